"""`python -m service`: serve until SIGTERM or SIGINT.

Exit code 0 after a clean stop, 2 for a wrong setting or for data that only a newer release reads, 3 (uvicorn's) if the
address cannot be bound.
"""

import signal

# The imports below take seconds, in which the signals that a running service acts on must not end the process.
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until rules_reload handles it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until task_dump handles it

import logging
import resource
import sys
from typing import Literal

import uvicorn
from starlette.types import ASGIApp

from service.app import build_router, read_configuration
from service.contract import PREFIX, SettingsError
from service.core.logs import configure_logging, last_line
from service.core.settings import Settings
from service.events.loaded_rules import LoadedRules
from service.http.limits import GuardedProtocol, ManagementProtocol, handshakes_max
from service.http.protocol import protocol_of
from service.http.server import LingeringServer
from service.http.tls import ServerTls
from service.router import Router

# After the deadline of the last accepted request: for its answer and its mark, the leases, and the journal.
DRAIN_EXTRA_S = 5
# Longer than load balancers keep an idle connection (mostly 60 s), so that the service does not close a connection on
# which a request is being sent.
IDLE_S = 75


def main() -> int:
    try:
        settings, loaded = read_configuration()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(settings.log_format, settings.log_keys)
    try:
        return _serve(settings, loaded)
    finally:
        logging.shutdown()  # a process of multiprocessing ends without it


def _serve(settings: Settings, loaded: LoadedRules) -> int:
    """Serve until a signal or a permanent fault; return the exit code. Raises SystemExit for an address in use."""
    wrong: list[SettingsError] = []

    def give_up(error: SettingsError) -> None:
        wrong.append(error)
        server.should_exit = True

    server = _server_of(build_router(settings, loaded, give_up), settings)

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn replaces these handlers while it runs. When it ends it raises the signals again that it has received.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        server.run()
    except SystemExit:
        if server.unbound is not None:  # the log has the system's word on the address, which names no setting
            last_line(_unbound(server.unbound, settings))
        raise
    if wrong:
        last_line(str(wrong[0]))
        return 2
    return 0


def _server_of(router: Router, settings: Settings) -> LingeringServer:
    """Make the server of the app, with TLS and with the management port where the settings want them."""
    stopping = router.current.endpoint.guard.stopping
    tls = None
    if settings.http_tls is not None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        tls = ServerTls(settings.http_tls, handshakes_max(files), router.telemetry)
    config = _config(
        router.app,
        settings.host,
        settings.port,
        # Without `direct` the connections hand all requests to the app.
        protocol_of(None if settings.transport == "asgi" else router.direct, stopping),
        lifespan="on",
        timeout_graceful_shutdown=settings.request_timeout_ms // 1000 + DRAIN_EXTRA_S,
    )
    management = [] if router.management is None else [_management(router.management, settings)]
    return LingeringServer(config, stopping, tls, management)


def _management(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Return the configuration of the management port: without TLS, for probes and scrapes inside a cluster."""
    return _config(app, settings.management_host or settings.host, settings.management_port, ManagementProtocol)


def _config(
    app: ASGIApp,
    host: str,
    port: int,
    http: type[GuardedProtocol],
    lifespan: Literal["on", "off"] = "off",
    timeout_graceful_shutdown: int | None = None,
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=http,
        lifespan=lifespan,
        timeout_graceful_shutdown=timeout_graceful_shutdown,
        loop="uvloop",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # without rules only loopback addresses may write, and a header could forge one
        backlog=4096,
        timeout_keep_alive=IDLE_S,
    )


def _unbound(config: uvicorn.Config, settings: Settings) -> str:
    """Say which settings name an address that cannot be had."""
    host, port = "HOST", "PORT"
    if config.port == settings.management_port:
        host, port = "MANAGEMENT_HOST" if settings.management_host else "HOST", "MANAGEMENT_PORT"
    return (
        f"{PREFIX}{host}={config.host!r}, {PREFIX}{port}={config.port}: it cannot listen there; set an address "
        "of this machine and a port that is free"
    )


if __name__ == "__main__":
    sys.exit(main())
