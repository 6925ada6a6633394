"""The app and the transport below it, whose routes and handlers are replaced together when the rules change."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import NamedTuple, Protocol

from starlette.routing import BaseRoute

from service.contract import Rules
from service.core.settings import Settings
from service.events.loaded_rules import LoadedRules
from service.http.application import Application
from service.http.callers import Callers
from service.http.events import EventsEndpoint
from service.http.produce import ProduceRequests
from service.http.produce_listing import ListingParts, ProduceListing
from service.http.produce_v2 import ProduceV2
from service.http.produce_v3 import ProduceV3
from service.http.protocol import DirectRoutes
from service.http.rates import Rates
from service.http.request_guard import RequestGuard
from service.http.routes import Parts, add_middleware, add_probes, event_routes
from service.http.sources import SourcesEndpoint
from service.http.token_callers import CurrentTokenCallers, TokenCallers
from service.pipeline.admission import Admission


class ServiceParts(Parts, ListingParts, Protocol):
    """The parts of a running service that take requests."""

    settings: Settings
    admission: Admission
    tokens: CurrentTokenCallers
    rates: Rates


class RoutesOfRules(NamedTuple):
    """The endpoints and routes made of one reading of the rules; a request keeps those with which it began."""

    loaded: LoadedRules
    endpoint: EventsEndpoint
    sources: SourcesEndpoint
    routes: list[BaseRoute]

    @property
    def callers(self) -> Callers:
        return self.endpoint.guard.callers


class Router:
    """The app and the direct transport's handlers, by the rules that hold, and the app of the management port."""

    def __init__(
        self,
        service: ServiceParts,
        loaded: LoadedRules,
        running: Callable[[Callable[[LoadedRules], Callable[[], None]]], AbstractAsyncContextManager[None]],
    ) -> None:
        """`running` is the service from start to stop, which gives `build` the rules that change meanwhile."""
        self._service = service
        self.telemetry = service.telemetry
        self.app = Application(
            (), lambda _: running(self.build), has_documentation=not service.settings.management_port
        )
        self.management: Application | None = None  # with a port of its own
        add_middleware(self.app)
        if service.settings.management_port:
            self.management = Application()
            add_middleware(self.management)
        add_probes(self.management or self.app, service)
        self._always = list(self.app.router.routes)
        self.current = self._made(loaded)
        endpoint = self.current.endpoint
        guard = endpoint.guard
        self.direct = DirectRoutes(endpoint.routes, guard.body_bytes_max, guard.bodies, endpoint.streamed)
        self._swap(self.current)

    def build(self, loaded: LoadedRules) -> Callable[[], None]:
        """Make all that these rules decide, in any thread; return what has them decide about each request from then on.

        Requests that have begun go on with the rules of their beginning: their routes and handlers refer to them.
        """
        return partial(self._swap, self._made(loaded, self.current))

    def _swap(self, made: RoutesOfRules) -> None:
        cors = made.loaded.rules.cors
        self._service.tokens.use(made.callers.tokens)
        self.current = made
        self.app.router.routes = [*self._always, *made.routes]
        self.app.set_cors(cors)
        self.direct.replace(made.endpoint.routes, cors=bool(cors))

    def _made(self, loaded: LoadedRules, before: RoutesOfRules | None = None) -> RoutesOfRules:
        """Make all that the rules decide. Bounds of the process, and the rates of callers, are those of `before`."""
        service, rules = self._service, loaded.rules
        settings, telemetry = service.settings, service.telemetry
        admission = service.admission if before is None else before.endpoint.admission.with_rules(rules, loaded.schemas)
        callers = Callers(
            rules.callers,
            tokens=self._tokens_of(rules, before),
            rates=service.rates,
            with_sources=bool(rules.sources),
            before=None if before is None else before.callers,
        )
        guard = RequestGuard(settings, callers) if before is None else before.endpoint.guard.with_callers(callers)
        endpoint = EventsEndpoint(guard, admission, telemetry, settings.key_ttl_s)
        produce = ProduceRequests(
            guard, admission, telemetry, rules, settings.key_ttl_s, has_registry=bool(settings.registry)
        )
        known_sources = None if before is None else before.sources
        sources = SourcesEndpoint(
            loaded.sources, admission, settings, guard.bodies, telemetry, service.rates, known_sources
        )
        routes = [
            *event_routes(service, endpoint),
            *ProduceV2(produce).routes(),
            *ProduceV3(produce).routes(),
            *ProduceListing(guard, service).routes(),
            sources.route(),
        ]
        return RoutesOfRules(loaded, endpoint, sources, routes)

    def _tokens_of(self, rules: Rules, before: RoutesOfRules | None) -> TokenCallers | None:
        """Return the callers with JSON Web Tokens: those of `before`, with their rates, while no issuer has changed."""
        if before is not None and before.loaded.rules.issuers == rules.issuers:
            return before.callers.tokens
        return self._service.tokens.callers if before is None else self._service.tokens.make(rules)
