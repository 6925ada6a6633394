"""Tests topics whose values have a JSON Schema, over HTTP."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.console import StackError
from tests.integration.conftest import Stage


def rules_for(folder: Path, topic: str) -> Path:
    (folder / "order.json").write_text('{"type": "object", "required": ["total"]}')
    path = folder / "rules.toml"
    path.write_text(f'[[topics]]\npattern = "{topic}"\nschema = "order.json"\n')
    return path


async def post(stage: Stage, url: str, body: Any, key: str | None = None) -> httpx.Response:
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Idempotency-Key": key})
    return await stage.client.http.post(url, content=json.dumps(body), headers=headers)


async def test_a_value_that_its_schema_does_not_allow_uses_up_no_key(stage: Stage, topic: str, tmp_path: Path) -> None:
    service = await stage.started(rules=rules_for(tmp_path, topic))
    url, batch = f"{service.url}/events", f"{service.url}/events/batch"
    bad, good = {"topic": topic, "value": {"sum": 1}}, {"topic": topic, "value": {"total": 1}}

    refused = await post(stage, url, bad, "order-1")
    assert (refused.status_code, refused.json()["code"]) == (422, "schema-mismatch")
    assert refused.json()["detail"] == f'value: "total" is a required property: see the schema of {topic}'
    first = await post(stage, url, good, "order-1")
    assert (first.status_code, "idempotent-replayed" in first.headers) == (201, False)

    each = await post(stage, batch, {"events": [event | {"idempotency_key": "order-2"} for event in (bad, good)]})
    assert [result["status"] for result in each.json()["results"]] == [422, 201]
    whole = await post(stage, batch, {"atomic": True, "events": [good, bad]}, "order-3")
    assert (whole.status_code, whole.json()["detail"].partition(":")[0]) == (422, "events[1].value")


async def test_an_invalid_schema_stops_the_start(stage: Stage, topic: str, tmp_path: Path) -> None:
    rules = rules_for(tmp_path, topic)
    (tmp_path / "order.json").write_text("{")
    service = stage.service(rules=rules)
    with pytest.raises(StackError):
        await stage.start(service)
    assert service.exit_code == 2
    (line,) = service.log.read_text().splitlines()
    assert line.startswith(f"FENCEPOST_RULES: schema {tmp_path / 'order.json'} cannot be used: ")
