"""Tests what a login at Kafka presents: certificates and passwords as their files have them now."""

import shutil
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from aiokafka import errors
from structlog.testing import capture_logs

from service.contract import SharedSettings
from service.kafka.security import Security
from service.kafka.tokens import TokenFile, TokenRefused
from tests.secured import Authority

PASSWORD: Final = SharedSettings(
    kafka_security_protocol="SASL_PLAINTEXT",
    kafka_sasl_mechanism="SCRAM-SHA-512",
    kafka_sasl_username="me",
    kafka_sasl_password="hush",
)


def test_plaintext_has_no_tls_and_no_login() -> None:
    security = Security(SharedSettings())
    assert (security.tls_options(), security.mechanism) == ({}, "")


async def test_a_login_by_a_password_reads_the_password_and_one_by_a_token_reads_the_token(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    plain = Security(replace(PASSWORD, kafka_sasl_mechanism="PLAIN", secret_files={"kafka_sasl_password": str(file)}))
    for password in ("first", "second"):
        file.write_text(password)
        authenticator = plain.authenticator()
        assert await authenticator.step(None) == (f"me\0me\0{password}".encode(), True)
        assert await authenticator.step(b"") is None
    assert (plain.mechanism, plain.tls_options()) == ("PLAIN", {})
    bearer = SharedSettings(
        kafka_security_protocol="SASL_PLAINTEXT", kafka_sasl_mechanism="OAUTHBEARER", kafka_oauth_token_file=str(file)
    )
    file.write_text("a.b.c")
    message, _ = await Security(bearer).authenticator().step(None)
    assert message == b"n,,\x01auth=Bearer a.b.c\x01\x01"


async def test_a_login_by_scram_is_the_exchange_of_rfc_5802() -> None:
    authenticator = Security(PASSWORD).authenticator()
    first, _ = await authenticator.step(None)
    assert first.startswith(b"n,,n=me,r=")
    nonce = first.removeprefix(b"n,,n=me,r=")
    final, _ = await authenticator.step(b"r=%b7,s=c2FsdA==,i=4096" % nonce)
    assert final.startswith(b"c=biws,r=%b7,p=" % nonce)
    with pytest.raises(ValueError, match="signature"):
        await authenticator.step(b"v=bm8=")


def test_certificates_are_read_again_where_their_files_change_and_else_are_not(
    tmp_path: Path, authority: Authority
) -> None:
    """A mounted secret of Kubernetes changes by a link that is swapped."""
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        issued = authority.issue(f"renewed-{folder.name}")
        shutil.copy(issued.certfile, folder / "crt")
        shutil.copy(issued.keyfile, folder / "key")
    mounted = tmp_path / "mounted"
    mounted.symlink_to(folders[0])
    settings = SharedSettings(
        kafka_security_protocol="SSL",
        kafka_ssl_cafile=str(authority.cafile),
        kafka_ssl_certfile=str(mounted / "crt"),
        kafka_ssl_keyfile=str(mounted / "key"),
    )
    security = Security(settings)

    def context() -> ssl.SSLContext:
        found = security.tls_options()["ssl_context"]
        assert isinstance(found, ssl.SSLContext)
        return found

    first = context()
    assert context() is first
    mounted.unlink()
    mounted.symlink_to(folders[1])
    second = context()
    assert second is not first
    with capture_logs() as logs:
        (folders[1] / "crt").write_text("half of a certificate")
        assert context() is second
        (folders[1] / "crt").unlink()
        assert context() is second
    assert [line["log_level"] for line in logs][:1] == ["warning"]
    shutil.copy(folders[0] / "crt", folders[1] / "crt")
    shutil.copy(folders[0] / "key", folders[1] / "key")
    assert context() is not second


@pytest.mark.parametrize(
    ("security", "refused", "says"),
    [
        (
            Security(PASSWORD),
            errors.SaslAuthenticationFailed("no"),
            "FENCEPOST_KAFKA_SASL_USERNAME, FENCEPOST_KAFKA_SASL_PASSWORD or FENCEPOST_KAFKA_SASL_MECHANISM is wrong",
        ),
        (
            Security(PASSWORD, TokenFile("/token", {})),
            errors.SaslAuthenticationFailed("invalid_token"),
            "FENCEPOST_KAFKA_SASL_MECHANISM=OAUTHBEARER: Kafka at 127.0.0.1:9092 refuses the token of the token file",
        ),
        (
            Security(PASSWORD, TokenFile("/token", {})),
            TokenRefused("401"),
            "FENCEPOST_KAFKA_OAUTH_CLIENT_ID, FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET or FENCEPOST_KAFKA_OAUTH_SCOPE is",
        ),
    ],
)
def test_a_refused_login_names_the_settings(security: Security, refused: Exception, says: str) -> None:
    assert security.remedy(refused).startswith(says)
