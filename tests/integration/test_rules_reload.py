"""Tests that a running service takes changed rules under load: no request fails, and a stream keeps its rules."""

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from deploy.stack import Service
from service.contract.wire.headers import KEY_HEADER
from tests.integration.conftest import Stage
from tests.integration.judge import read_committed

STREAM = {"content-type": "application/x-ndjson", "authorization": "Bearer till"}


def rules(*names: str, more: str = "") -> str:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    return "".join(f'[[callers]]\nname = "{name}"\ntoken_sha256 = "{digests[name]}"\n' for name in names) + more


def publish(folder: Path, text: str) -> str:
    """Replace a mounted file as kubelet does; returns its digest."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    (version / "rules.toml").write_text(text)
    (folder / "..data_tmp").symlink_to(version.name)
    (folder / "..data_tmp").rename(folder / "..data")
    return hashlib.sha256(text.encode()).hexdigest()


async def in_force(http: httpx.AsyncClient, url: str) -> tuple[str, bool]:
    """Return the digest of the rules in force, and whether the last reading was taken."""
    lines = (await http.get(f"{url}/metrics")).text.splitlines()
    (info,) = [line for line in lines if line.startswith("fencepost_rules_info{")]
    (taken,) = [line for line in lines if line.startswith("fencepost_rules_last_reload_successful ")]
    return info.split('sha256="')[1].split('"')[0], taken.endswith(" 1.0")


async def wait_for(http: httpx.AsyncClient, url: str, wanted: tuple[str, bool]) -> None:
    async with asyncio.timeout(15):
        while await in_force(http, url) != wanted:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("transport", ["direct", "asgi"])
async def test_changed_rules_are_taken_under_load(stage: Stage, topic: str, tmp_path: Path, transport: str) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    first = publish(mounted, rules("shop", "till"))
    (mounted / "rules.toml").symlink_to("..data/rules.toml")
    service = await stage.started(rules=mounted / "rules.toml", transport=transport)
    http, url = stage.client.http, service.url
    assert await in_force(http, url) == (first, True)

    written: list[str] = []
    over = asyncio.Event()

    async def post(sender: int) -> None:
        n = 0
        while not over.is_set():
            key = f"{sender}-{n}"
            headers = {"authorization": "Bearer shop", "idempotency-key": key}
            answer = await http.post(f"{url}/events", json={"topic": topic, "value": n}, headers=headers)
            assert answer.status_code == 201, answer.text
            written.append(key)
            n += 1

    lines: asyncio.Queue[str | None] = asyncio.Queue()

    async def body() -> AsyncIterator[bytes]:
        key: str | None = ""
        while key is not None:
            try:
                async with asyncio.timeout(2):
                    key = await lines.get()
            except TimeoutError:
                yield b"\n"  # keeps the stream open
                continue
            if key is not None:
                yield json.dumps({"topic": topic, "value": 0, "idempotency_key": key}).encode() + b"\n"

    async def stream() -> list[int]:
        async with http.stream("POST", f"{url}/events/batch", content=body(), headers=STREAM) as answer:
            return [json.loads(line)["status"] async for line in answer.aiter_lines()]

    load = [asyncio.create_task(post(sender)) for sender in range(4)]
    streaming = asyncio.create_task(stream())
    await lines.put("streamed-before")
    await asyncio.sleep(0.5)

    second = publish(mounted, rules("shop", more='[[topics]]\npattern = "*"\nkey_ttl_s = 90000\n'))
    await wait_for(http, url, (second, True))
    await lines.put("streamed-after")  # its caller has gone, but its stream had begun
    refused = await http.post(
        f"{url}/events", json={"topic": topic, "value": 0}, headers={"authorization": "Bearer till"}
    )
    assert refused.status_code == 401

    publish(mounted, rules("shop", more='[[topics]]\npattern = "*"\nkey_ttl = 90000\n'))
    await wait_for(http, url, (second, False))
    assert (await http.get(f"{url}/readyz")).status_code == 200
    await wait_until_logged(service, "rules.toml:6: key_ttl: no such setting")

    last = publish(mounted, rules("shop"))
    for _ in range(20):
        os.kill(service.pid, signal.SIGHUP)
        await asyncio.sleep(0.05)
    await wait_for(http, url, (last, True))

    over.set()
    await lines.put(None)
    assert await streaming == [201, 201]
    await asyncio.gather(*load)
    records = await asyncio.to_thread(read_committed, stage.kafka.bootstrap, [topic])
    keys = [dict(record.headers)[KEY_HEADER].decode() for record in records]
    assert sorted(keys) == sorted([*written, "streamed-before", "streamed-after"])


async def wait_until_logged(service: Service, text: str) -> None:
    async with asyncio.timeout(10):
        while text not in service.log.read_text():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.1)
