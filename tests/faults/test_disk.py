"""Tests a full disk, for the writer of a file and for Redis. (A broker with a full disk ends: see the matrix.)"""

import errno
import time
from pathlib import Path

import pytest
import redis as redis_client

from deploy.stack import Redis
from tests.faults.disk import Disk, lacking


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := lacking():
        pytest.skip(why)


def test_a_full_disk_takes_nothing_and_keeps_what_it_has(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "before").write_text("kept")
    with Disk(folder, megabytes=4) as disk:
        assert (folder / "before").read_text() == "kept"
        disk.fill()
        with pytest.raises(OSError, match="No space left") as full:
            (folder / "too much").write_text("x")
        assert full.value.errno == errno.ENOSPC
        disk.free()
        (folder / "after").write_text("kept too")
        disk.fill()
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "before": "kept",
        "after": "kept too",
        "too much": "",
    }


@pytest.mark.parametrize("saving", [["--appendonly", "yes"], ["--save", "1 1"]], ids=["aof", "rdb"])
def test_redis_refuses_writes_for_as_long_as_its_disk_is_full(tmp_path: Path, saving: list[str]) -> None:
    with Disk(tmp_path / "disk", megabytes=8) as disk:
        server = Redis(tmp_path, args=["--dir", str(disk.folder), *saving])
        with server, server.client() as client:
            client.set("key", "before")
            disk.fill()
            assert until(client, fails=True).startswith("MISCONF")
            assert client.get("key") is not None  # reads succeed
            disk.free()
            until(client, fails=False)


def until(client: redis_client.Redis, fails: bool) -> str:
    """Write until a write fails, or succeeds; returns the last answer."""
    deadline = time.monotonic() + 20
    number = 0
    while True:
        number += 1
        answer = ""
        try:
            client.set("key", f"{number}" * 1000)
        except redis_client.ResponseError as error:
            answer = str(error)
        if bool(answer) is fails:
            return answer
        assert time.monotonic() < deadline, f"writes still {'succeed' if fails else f'fail: {answer}'}"
        time.sleep(0.05)
