"""Checks the login at Kafka: whether there is a token, and whose ACLs count."""

import time
from typing import Any

from service.cli.finding import Finding, Level
from service.core.settings import Settings
from service.kafka.tokens import TokenError, TokenRefused, TokenSource, claims_of, shortened

_CLAIMS = ("iss", "aud", "scope")


async def examine(settings: Settings, tokens: TokenSource | None) -> list[Finding]:
    """Get a token from the source of the settings, if the mechanism needs one, and name the principal."""
    if tokens is None:
        return [Finding("login.principal", Level.OK, principal(settings))]
    findings = []
    if settings.kafka_oauth_token_url.startswith("http://"):
        change = "set FENCEPOST_KAFKA_OAUTH_TOKEN_URL=https://…, unless a proxy of this machine adds TLS"
        findings.append(Finding("login.token-tls", Level.WARNING, "the client's secret is sent without TLS", change))
    try:
        token = await tokens.token()
    except TokenError as error:
        return [*findings, Finding("login.token", Level.ERROR, str(error), _remedy(settings, error))]
    claims = claims_of(token)
    findings.append(Finding("login.token", Level.OK, f"{tokens.name} gives one{_described(claims)}"))
    return [*findings, Finding("login.principal", Level.OK, principal(settings, claims))]


def principal(settings: Settings, claims: dict[str, Any] | None = None) -> str:
    """Name the principal whose ACLs count for the service, as far as the client knows."""
    if settings.kafka_oauth_aws_region:
        return "the IAM identity of AWS's credentials: its policies count (kafka-cluster:*), not ACLs"
    if settings.kafka_oauth:
        name = shortened(str((claims or {}).get("sub", "")))
        return (
            f"User:{name}, unless the brokers' sasl.oauthbearer.sub.claim.name is another claim" if name else "unknown"
        )
    if settings.kafka_sasl:
        return f"User:{settings.kafka_sasl_username}"
    if settings.kafka_ssl_certfile:
        return "User: and the subject of FENCEPOST_KAFKA_SSL_CERTFILE, by the brokers' ssl.principal.mapping.rules"
    return "User:ANONYMOUS"


def _described(claims: dict[str, Any]) -> str:
    """Describe a token by its claims; "" if it has none that can be read."""
    parts = [f"{name} {shortened(str(claims[name]))}" for name in _CLAIMS if name in claims]
    if isinstance(ends := claims.get("exp"), int | float):
        parts.append(f"ends in {ends - time.time():.0f} s")
    return f": {', '.join(parts)}" if parts else ""


def _remedy(settings: Settings, error: TokenError) -> str:
    if settings.kafka_oauth_aws_region:
        return "give the process credentials of AWS (a role of its pod or machine, or AWS_… variables)"
    if settings.kafka_oauth_token_file:
        return "mount the token at FENCEPOST_KAFKA_OAUTH_TOKEN_FILE (on Kubernetes a projected serviceAccountToken)"
    if isinstance(error, TokenRefused):
        return "set FENCEPOST_KAFKA_OAUTH_CLIENT_ID, _CLIENT_SECRET and _SCOPE to what the token endpoint knows"
    return "check FENCEPOST_KAFKA_OAUTH_TOKEN_URL, the network to it, and FENCEPOST_KAFKA_OAUTH_CAFILE"
