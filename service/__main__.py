"""`python -m service`: serve until SIGTERM or SIGINT.

Exit 0 after a clean stop, 2 where a setting is wrong, 3 (uvicorn's own) where it cannot listen at its address.
"""

import os
import signal
import sys

import uvicorn

from service.app import create_app
from service.claims.redis_store import check_url
from service.contract import PREFIX, Rules, SettingsError
from service.core.logs import configure_logging
from service.core.settings import Settings
from service.events.schemas import Schemas
from service.http.limits import LingeringServer
from service.http.protocol import protocol_of

# Past the deadline of the last request that was accepted: its answer, its mark, the leases, the journal.
DRAIN_EXTRA_S = 5
# Longer than load balancers keep a connection that nobody uses (60 s with most): who ends it first must not be we,
# while a request is on its way.
IDLE_S = 75


def main() -> int:
    if not __debug__:
        print("python -O is not supported: aiokafka checks its states with assert; start without it", file=sys.stderr)
        return 2
    try:
        settings, rules, schemas = _configuration()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging(settings.log_format, settings.log_keys)
    wrong: list[SettingsError] = []

    def give_up(error: SettingsError) -> None:
        wrong.append(error)
        server.should_exit = True

    app, routes = create_app(settings, rules, schemas, give_up)
    server = LingeringServer(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http=protocol_of(routes, settings.body_bytes_max, settings.bodies_bytes_max),
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # nothing here depends on the client's address
            backlog=4096,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=settings.request_timeout_ms // 1000 + DRAIN_EXTRA_S,
        )
    )

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn takes these over while it runs, and sends itself what it has met once more when it is done: to us then.
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


def _configuration() -> tuple[Settings, Rules, Schemas]:
    """What is set, and the rules. Raises SettingsError with a line for each mistake in either."""
    wrong: list[str] = []
    try:
        settings = Settings.from_env()
        check_url(settings.redis)
    except SettingsError as error:
        wrong.append(str(error))
    try:
        rules = Rules.read(os.environ.get(f"{PREFIX}RULES", ""))
        schemas = Schemas(rules)
    except SettingsError as error:
        wrong.append(str(error))
    if wrong:
        raise SettingsError("\n".join(wrong))
    return settings, rules, schemas


if __name__ == "__main__":
    sys.exit(main())
