"""Checks the Schema Registry: whether it answers, and whether it has the schemas that the rules name."""

from collections.abc import Iterable, Iterator

from service.cli.finding import Finding, Level, grouped
from service.contract import Rules, SchemaRule
from service.core.metrics import Telemetry
from service.core.settings import Settings

_GLOB = frozenset("*?[")


async def examine(settings: Settings, rules: Rules) -> list[Finding]:
    """Ask the registry of the settings; nothing without one. A rule's subject is asked for if its name is known."""
    if not settings.registry:
        return []
    from service.registry.client import RegistryClient
    from service.registry.schema import RegistryAway, SchemaAbsent, SchemaUnusable

    client = RegistryClient(settings, Telemetry())
    try:
        types = await client.types()
        rows = [("", Finding("registry.reachable", Level.OK, f"{settings.registry} takes {', '.join(sorted(types))}"))]
        for subject, version in subjects_of(rules):
            try:
                found = await client.by_version(subject, version)
            except (SchemaAbsent, SchemaUnusable) as error:
                change = "register the schema, or correct the subject or the version in the rules"
                rows.append((subject, Finding("registry.subjects", Level.ERROR, str(error), change)))
            else:
                what = f"{found.schema.type.value}, version {found.version}"
                rows.append((subject, Finding("registry.subjects", Level.OK, what)))
        return [_without_subject(one) for one in grouped(rows)]
    except RegistryAway as error:
        change = "check FENCEPOST_REGISTRY with its path, the credentials, and FENCEPOST_REGISTRY_CAFILE"
        return [Finding("registry.reachable", Level.ERROR, str(error), change)]
    finally:
        await client.close()


def subjects_of(rules: Rules) -> Iterator[tuple[str, int | None]]:
    """List the subjects of the rules, each once, whose names do not depend on a topic that only a glob tells."""
    seen: set[tuple[str, int | None]] = set()
    for rule in rules.topics:
        if rule.registry is None:
            continue
        for part, schema in _parts(rule.registry.key, rule.registry.value):
            depends = not schema.subject and schema.strategy != "record"
            named = schema.subject_of(rule.pattern, part), schema.version
            if (depends and _GLOB & set(rule.pattern)) or named in seen:
                continue
            seen.add(named)
            yield named


def _parts(key: SchemaRule | None, value: SchemaRule | None) -> Iterable[tuple[str, SchemaRule]]:
    return [(part, schema) for part, schema in (("key", key), ("value", value)) if schema is not None]


def _without_subject(one: Finding) -> Finding:
    return one if one.subjects != ("",) else Finding(one.check, one.level, one.found, one.change)
