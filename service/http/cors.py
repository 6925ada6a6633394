"""CORS (Fetch standard) by rule: web pages of the origins that the rules name may call the API from a browser.

Preflights are answered before anything else looks at the request: without a token, and without a key.
"""

import re
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.contract import CorsRule

METHODS: Final = ("GET", "HEAD", "POST")
# Request headers of the API, beside those that need no permission.
REQUEST_HEADERS: Final = (
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "Idempotency-Key",
    "Prefer",
    "Repeatability-First-Sent",
    "Repeatability-Request-ID",
    "Traceparent",
    *(
        f"ce-{name}"
        for name in (
            "dataschema",
            "id",
            "partitionkey",
            "source",
            "specversion",
            "subject",
            "time",
            "topic",
            "type",
        )
    ),
)
# Headers of answers that scripts may read, beside those that they always may.
EXPOSED_HEADERS: Final = (
    "Idempotency-Key",
    "Idempotency-Key-Expires",
    "Idempotent-Replayed",
    "Location",
    "Preference-Applied",
    "RateLimit",
    "RateLimit-Policy",
    "Repeatability-Result",
    "Retry-After",
)


class CorsByOrigin:
    """Answers preflights, and adds the headers of CORS to all other answers, by the rule that names the origin."""

    def __init__(self, app: ASGIApp, rules: Sequence[CorsRule]) -> None:
        self._by_rule = [_middleware(app, rule) for rule in rules]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin", "") if scope["type"] == "http" else ""
        allowing = (each for each in self._by_rule if each.is_allowed_origin(origin))
        await next(allowing, self._by_rule[0])(scope, receive, send)


def _middleware(app: ASGIApp, rule: CorsRule) -> CORSMiddleware:
    patterns = [_pattern(origin) for origin in rule.origins if "*" in origin]
    return CORSMiddleware(
        app,
        allow_origins=rule.origins,
        allow_origin_regex="|".join(patterns) if patterns else None,
        allow_methods=METHODS,
        allow_headers=(*REQUEST_HEADERS, *rule.headers),
        expose_headers=EXPOSED_HEADERS,
        max_age=rule.max_age_s,
    )


def _pattern(origin: str) -> str:
    """Make the regular expression of an origin with `*`, which stands for one label of a host or several."""
    return re.escape(origin).replace(r"\*", r"[a-z0-9-]+(?:\.[a-z0-9-]+)*")
