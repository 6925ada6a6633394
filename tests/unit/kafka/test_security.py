"""Tests what a login at Kafka presents: certificates and passwords as their files have them now."""

import shutil
import ssl
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


def test_plaintext_has_no_options() -> None:
    assert Security(SharedSettings()).options() == {}


def test_a_password_goes_with_its_mechanism_and_a_source_of_tokens_without_a_password(tmp_path: Path) -> None:
    assert Security(PASSWORD).options() == {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "me",
        "sasl_plain_password": "hush",
    }
    file = tmp_path / "token"
    settings = SharedSettings(
        kafka_security_protocol="SASL_PLAINTEXT",
        kafka_sasl_mechanism="OAUTHBEARER",
        kafka_oauth_token_file=str(file),
    )
    options = Security(settings).options()
    assert isinstance(options.pop("sasl_oauth_token_provider"), TokenFile)
    assert options == {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": "OAUTHBEARER"}


def test_certificates_are_read_anew_where_their_files_change_and_else_are_not(
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
        found = security.options()["ssl_context"]
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
