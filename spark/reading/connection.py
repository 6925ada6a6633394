"""The connection settings of both Kafka clients: addresses, TLS, SASL."""

from pathlib import Path
from typing import Final

from service.contract import SharedSettings
from spark.errors import NeedsSpark

# Login handlers for OAUTHBEARER: of kafka-clients, and of Amazon's jar.
LOGIN_HANDLER: Final = "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler"
MSK_HANDLER: Final = "software.amazon.msk.auth.iam.IAMOAuthBearerLoginCallbackHandler"


def for_kafka_clients(shared: SharedSettings) -> dict[str, str]:
    """Return the connection settings of kafka-clients (brokers, TLS, SASL).

    Certificates and keys are passed as text, since executors on other machines lack the files. Kafka treats these
    settings as secrets and logs `[hidden]` for them.
    """
    config = {"bootstrap.servers": shared.kafka, "security.protocol": shared.kafka_security_protocol}
    if shared.kafka_tls:
        config["ssl.endpoint.identification.algorithm"] = "https" if shared.kafka_ssl_check_hostname else ""
        if shared.kafka_ssl_cafile:
            config["ssl.truststore.type"] = "PEM"
            config["ssl.truststore.certificates"] = Path(shared.kafka_ssl_cafile).read_text(encoding="utf-8")
        if shared.kafka_ssl_certfile:
            config["ssl.keystore.type"] = "PEM"
            config["ssl.keystore.certificate.chain"] = Path(shared.kafka_ssl_certfile).read_text(encoding="utf-8")
            config["ssl.keystore.key"] = Path(shared.kafka_ssl_keyfile).read_text(encoding="utf-8")
    if shared.kafka_oauth:
        config |= _oauth(shared)
    elif shared.kafka_sasl:
        module = "plain.PlainLoginModule" if shared.kafka_sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
        config["sasl.mechanism"] = shared.kafka_sasl_mechanism
        config["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required "
            f"username={_quoted(shared.kafka_sasl_username)} password={_quoted(shared.kafka_sasl_password)};"
        )
    return config


def _oauth(shared: SharedSettings) -> dict[str, str]:
    """Return the settings of OAUTHBEARER: kafka-clients gets and renews the tokens itself, also in executors.

    A token file must be at its path on the executors' machines too. For Amazon MSK the handlers are those of the jar
    `aws-msk-iam-auth`, which finds region and credentials as AWS's SDK does.
    """
    options = {f"extension_{name}": value for name, value in shared.kafka_oauth_extensions_by_name.items()}
    config = {"sasl.mechanism": shared.kafka_sasl_mechanism, "sasl.login.callback.handler.class": LOGIN_HANDLER}
    if shared.kafka_oauth_aws_region:
        config["sasl.login.callback.handler.class"] = MSK_HANDLER
        config["sasl.client.callback.handler.class"] = MSK_HANDLER
    elif shared.kafka_oauth_token_file:
        config["sasl.oauthbearer.token.endpoint.url"] = Path(shared.kafka_oauth_token_file).absolute().as_uri()
    else:
        config["sasl.oauthbearer.token.endpoint.url"] = shared.kafka_oauth_token_url
        # As RFC 6749, section 2.3.1, demands; kafka-clients leaves that out by default.
        config["sasl.oauthbearer.header.urlencode"] = "true"
        options |= {"clientId": shared.kafka_oauth_client_id, "clientSecret": shared.kafka_oauth_client_secret}
        if shared.kafka_oauth_scope:
            options["scope"] = shared.kafka_oauth_scope
        if shared.kafka_oauth_cafile:
            authorities = Path(shared.kafka_oauth_cafile).read_text(encoding="utf-8")
            options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authorities}
    given = "".join(f" {name}={_quoted(value)}" for name, value in options.items())
    module = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
    return config | {"sasl.jaas.config": f"{module} required{given};"}


def _quoted(text: str) -> str:
    """Quote a value for a JAAS configuration, which has no line breaks in a value."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def for_librdkafka(shared: SharedSettings) -> dict[str, str]:
    """Return the connection settings of librdkafka (brokers, TLS, SASL); NeedsSpark for OAUTHBEARER, whose tokens
    kafka-clients gets."""
    if shared.kafka_oauth:
        raise NeedsSpark("OAUTHBEARER")
    config = {"bootstrap.servers": shared.kafka, "security.protocol": shared.kafka_security_protocol}
    if shared.kafka_tls:
        config["ssl.endpoint.identification.algorithm"] = "https" if shared.kafka_ssl_check_hostname else "none"
        if shared.kafka_ssl_cafile:
            config["ssl.ca.location"] = shared.kafka_ssl_cafile
        if shared.kafka_ssl_certfile:
            config["ssl.certificate.location"] = shared.kafka_ssl_certfile
            config["ssl.key.location"] = shared.kafka_ssl_keyfile
    if shared.kafka_sasl:
        config["sasl.mechanism"] = shared.kafka_sasl_mechanism
        config["sasl.username"] = shared.kafka_sasl_username
        config["sasl.password"] = shared.kafka_sasl_password
    return config
