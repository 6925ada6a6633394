"""Imports go one way, and each vendor has one door."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICE = sorted((ROOT / "service").rglob("*.py"))
SPARK = sorted((ROOT / "spark").rglob("*.py"))
# What both halves read.
CONTRACT = [ROOT / "service" / "wire.py", *sorted((ROOT / "service" / "shared").glob("*.py"))]

# From the edge down; a module may import those of its own layer and of the layers below.
LAYERS = [
    {"cli", "cli.__main__"},
    {"cli.commands"},
    {"cli.doctor", "cli.show"},
    {"cli.check_access", "cli.check_brokers", "cli.check_clocks", "cli.check_redis", "cli.check_topics", "cli.look"},
    {"cli.finding", "cli.parts"},
    {"__main__"},
    {"app"},
    {"api", "events_endpoint"},
    {"http_posts", "http_guard", "openapi"},
    {"ingest", "batch", "pool", "rendering"},
    {"intake"},
    {"recovery", "journal", "group", "clocks", "tracing", "cloudevents", "waiters"},
    {"settling"},
    {"replay", "schemas"},
    {
        "slot",
        "control",
        "topics",
        "lso_watch",
        "keys",
        "keys_view",
        "queue",
        "kafka.producer",
        "kafka.reader",
        "kafka.survey",
    },
    {"request", "kafka.open_check"},
    {"kafka.life"},
    {"kafka.batches"},
    {"event", "follow", "kafka.cluster", "kafka.inspection", "kafka.security", "kafka.verdict", "kafka.partitioner"},
    {"kafka.client"},
    {"kafka.requests"},
    {"callers", "headers", "redis_connections", "redis_server", "strict_json", "supervision"},
    {
        "states",
        "hanging",
        "errors",
        "settings",
        "telemetry",
        "logs",
        "waits",
        "prefer",
        "shedding",
        "patience",
        "outbox",
        "kafka.deadline",
        "kafka.metadata",
    },
    {"shared"},
    {"shared.rules"},
    {"shared.settings"},
    {"wire"},
    {"native"},
]
DOORS = {
    "redis": {"keys", "redis_connections"},
    "hiredis": {"keys"},
    "aiokafka": {
        "settling",
        "follow",
        "kafka.batches",
        "kafka.client",
        "kafka.cluster",
        "kafka.inspection",
        "kafka.life",
        "kafka.metadata",
        "kafka.producer",
        "kafka.reader",
        "kafka.requests",
        "kafka.survey",
        "kafka.verdict",
        "kafka.partitioner",
    },
    "fastapi": {"app", "api"},
    "starlette": {"app", "api"},
    "uvicorn": {"__main__", "http_guard", "http_posts"},
    "httptools": {"http_guard", "http_posts"},
    "prometheus_client": {"telemetry"},
    "structlog": None,
    "opentelemetry": {"tracing"},
    "typer": {"cli.commands"},
    "rich": {"cli.show"},
    "msgspec": {
        "strict_json",
        "event",
        "batch",
        "openapi",
        "api",
        "cloudevents",
        "replay",
        "states",
        "request",
        "kafka.life",
    },
    "jsonschema_rs": {"schemas"},
    "pyspark": set(),
    "confluent_kafka": set(),
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT / "service").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    """Every module that is imported, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            module = node.module or ""
            names = (f"{module}.{name.name}" for name in node.names)
            yield from (name if is_module(name) else module for name in names)


def is_module(name: str) -> bool:
    """Whether a name is a module or a package of this project, and not something in one."""
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def layer_of(module: str) -> int:
    (layer,) = [number for number, modules in enumerate(LAYERS) if module in modules]
    return layer


@pytest.mark.parametrize("path", [path for path in SERVICE if module_of(path) not in ("", "kafka")], ids=module_of)
def test_a_module_imports_only_from_its_layer_and_below(path: Path) -> None:
    mine = layer_of(module_of(path))
    for name in imports(path):
        if name.startswith("service."):
            other = name.removeprefix("service.")
            assert layer_of(other) >= mine, f"{module_of(path)} imports {other}, which is above it"


@pytest.mark.parametrize("path", SERVICE, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_vendor_has_its_door(path: Path) -> None:
    for name in imports(path):
        vendor = name.partition(".")[0]
        if vendor in sys.stdlib_module_names or vendor == "service":
            continue
        assert vendor in DOORS, f"{vendor} has no door yet: say which module may import it"
        allowed = DOORS[vendor]
        assert allowed is None or module_of(path) in allowed, f"{module_of(path)} imports {vendor}"


@pytest.mark.parametrize("path", CONTRACT, ids=module_of)
def test_what_both_halves_read_needs_the_standard_library_only(path: Path) -> None:
    contract = {f"service.{module_of(path)}" for path in CONTRACT}
    for name in imports(path):
        assert name.partition(".")[0] in sys.stdlib_module_names or name in contract, name


@pytest.mark.parametrize("path", SPARK, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_job_imports_nothing_of_the_service_but_the_contract(path: Path) -> None:
    for name in imports(path):
        top = name.partition(".")[0]
        assert top not in ("fastapi", "aiokafka", "redis", "deploy", "tests"), name
        assert top != "service" or name in ("service.contract.wire", "service.contract"), name


@pytest.mark.parametrize("path", SERVICE + SPARK, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_product_knows_nothing_of_its_tests(path: Path) -> None:
    assert not any(name.partition(".")[0] in ("tests", "deploy") for name in imports(path))
