"""`python -m service`: serve until SIGTERM or SIGINT.

Exit code 0 after a clean stop, 2 for a wrong setting or for data that only a newer release reads, 3 (uvicorn's) if the
address cannot be bound.
"""

import signal
import sys

import uvicorn

from service.app import build_app, read_configuration
from service.contract import PREFIX, Rules, SettingsError
from service.core.logs import configure_logging
from service.core.settings import Settings
from service.http.events import EventsEndpoint
from service.http.limits import GuardedProtocol
from service.http.protocol import Posts, protocol_of
from service.http.server import LingeringServer

# After the deadline of the last accepted request: for its answer and its mark, the leases, and the journal.
DRAIN_EXTRA_S = 5
# Longer than load balancers keep an idle connection (mostly 60 s), so that the service does not close a connection on
# which a request is being sent.
IDLE_S = 75


def main() -> int:
    try:
        settings, rules, schemas, sources = read_configuration()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(settings.log_format, settings.log_keys)
    wrong: list[SettingsError] = []

    def give_up(error: SettingsError) -> None:
        wrong.append(error)
        server.should_exit = True

    app, endpoint = build_app(settings, rules, schemas, sources, give_up)
    server = LingeringServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http=_protocol(settings, rules, endpoint),
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # without rules only loopback addresses may write, and a header could forge one
            backlog=4096,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=settings.request_timeout_ms // 1000 + DRAIN_EXTRA_S,
        ),
        endpoint.stopping,
    )

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn replaces these handlers while it runs. When it ends it raises the signals again that it has received.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        server.run()
    except SystemExit:
        if not server.lifespan.should_exit:  # the log has the system's word on the address, which names no setting
            print(
                f"{PREFIX}HOST={settings.host!r}, {PREFIX}PORT={settings.port}: it cannot listen there; set an address "
                "of this machine and a port that is free",
                file=sys.stderr,
            )
        raise
    if wrong:
        print(wrong[0], file=sys.stderr)
        return 2
    return 0


def _protocol(settings: Settings, rules: Rules, endpoint: EventsEndpoint) -> type[GuardedProtocol]:
    """Return the protocol of the connections: it hands all requests to the app, or all but the POSTs of events."""
    posts = None
    if settings.transport != "asgi":
        routes, streamed = endpoint.routes, endpoint.streamed
        posts = Posts(routes, endpoint.body_bytes_max, endpoint.bodies, streamed, cors=bool(rules.cors))
    return protocol_of(posts, endpoint.stopping)


if __name__ == "__main__":
    sys.exit(main())
