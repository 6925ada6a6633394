"""TLS and SASL as aiokafka wants them told."""

from typing import Any

from service.contract import SharedSettings, tls_context


def security_of(settings: SharedSettings) -> dict[str, Any]:
    """The arguments by which a client shows who it is and believes who the brokers are; none for plain connections.

    The files were looked at when the settings were read; OSError where they have gone since.
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
