"""The TLS and SASL options of aiokafka's clients."""

from typing import Any

from service.contract import SharedSettings, tls_context


def security_of(settings: SharedSettings) -> dict[str, Any]:
    """Make a client's TLS and SASL arguments; none for PLAINTEXT.

    Raises OSError where a certificate file that was valid when the settings were read is unreadable now.
    """
    given: dict[str, Any] = {}
    if settings.kafka_security_protocol != "PLAINTEXT":
        given["security_protocol"] = settings.kafka_security_protocol
    if settings.kafka_tls:
        given["ssl_context"] = tls_context(
            settings.kafka_ssl_cafile,
            settings.kafka_ssl_certfile,
            settings.kafka_ssl_keyfile,
            settings.kafka_ssl_check_hostname,
        )
    if settings.kafka_sasl:
        given["sasl_mechanism"] = settings.kafka_sasl_mechanism
        given["sasl_plain_username"] = settings.kafka_sasl_username
        given["sasl_plain_password"] = settings.kafka_sasl_password
    return given
