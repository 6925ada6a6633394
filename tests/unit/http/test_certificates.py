"""Tests the names of certificates, and which caller they identify."""

import ssl
import subprocess
import time
from pathlib import Path

import pytest

from service.contract import CallerRule
from service.core.problems import UNAUTHORIZED, Problem
from service.http.callers import Callers
from service.http.certificates import NO_CERTIFICATE, Names, names_of

SUBJECT = r'/C=DE/O=Example\, "Shop" + Sons/OU=a/OU=b/CN=#1 <till>;'


def test_a_subject_is_written_as_openssl_prints_it(tmp_path: Path) -> None:
    cert = str(tmp_path / "cert.pem")
    made = ("-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2", "-subj", SUBJECT)
    names = "subjectAltName=DNS:shop.example.com,URI:spiffe://example.com/shop,email:shop@example.com,IP:10.0.0.1"
    command = ["openssl", "req", *made, "-addext", names, "-keyout", str(tmp_path / "key.pem"), "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    command = ["openssl", "x509", "-in", cert, "-noout", "-subject", "-nameopt", "RFC2253"]
    printed = (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().removeprefix("subject=")
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cert)
    (described,) = context.get_ca_certs()  # as getpeercert describes it
    assert names_of(described).expires_s == pytest.approx(time.time() + 2 * 86_400, abs=60)
    assert set(names_of(described)) == {
        f"subject:{printed}",
        "dns:shop.example.com",
        "uri:spiffe://example.com/shop",
        "email:shop@example.com",
    }


@pytest.mark.parametrize("certificate", [None, {}, {"subject": ()}])
def test_without_a_certificate_there_are_no_names(certificate: object) -> None:
    assert names_of(certificate) == NO_CERTIFICATE


def test_a_renewed_credential_keeps_what_is_left_of_the_rate() -> None:
    before = Callers([CallerRule("shop", (), rate=1, certificates=("dns:a",))])
    after = Callers([CallerRule("shop", ("00" * 32,), rate=1, certificates=("dns:b",))], before=before)
    assert after.of(None, Names({"dns:b"})) is before.of(None, Names({"dns:a"}))
    with pytest.raises(Problem) as caught:
        after.of(None, Names({"dns:a"}))
    assert caught.value.kind is UNAUTHORIZED


def test_an_expired_certificate_names_no_caller_on_a_connection_that_outlives_it() -> None:
    callers = Callers([CallerRule("shop", ("00" * 32,), certificates=("dns:a",))])
    names = names_of({"subjectAltName": (("DNS", "a"),), "notAfter": "Jan  1 00:00:00 2020 GMT"})
    with pytest.raises(Problem, match="certificate: it has expired") as caught:
        callers.of(None, names)
    assert caught.value.kind is UNAUTHORIZED
