"""Tests the spool: what is in it after each write, after a crash in the middle of one, and what it refuses."""

import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.places import ROOT
from service.fencepost.client import Spool, SpoolError, SpoolFull, SpoolInUse
from service.fencepost.client.events import Pending
from tests.unit.fencepost.fakes import FakeTime


def pending(*numbers: int, size: int = 0) -> list[Pending]:
    return [Pending(f"k-{n}", b"%d" % n + b"x" * size) for n in numbers]


def keys(spool: Spool) -> list[str]:
    found, number = list[str](), 0
    while row := spool.next_after(number, spool.newest()):
        number = row[0]
        found.append(row[1].key)
    return found


def test_open_events_are_read_in_order_with_the_time_at_which_they_were_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime()
    monkeypatch.setattr("service.fencepost.client.spool.time", clock)
    with Spool(tmp_path / "s") as spool:
        spool.add(pending(3, 1, 2))
        clock.now += 1.5
        spool.add([*pending(1), *pending(4, size=20)])  # 1 is open already, and stays as it is
        assert keys(spool) == ["k-3", "k-1", "k-2", "k-4"]
        assert spool.next_after(1, 9) == (2, Pending("k-1", b"1", 1_000_000))
        assert spool.next_after(3, 9) == (4, Pending("k-4", b"4" + b"x" * 20, 1_001_500))
        assert spool.next_after(3, 3) is None
        spool.close_events([*pending(3, 5), *pending(4, size=20)])
        assert (keys(spool), len(spool), spool.newest()) == (["k-1", "k-2"], 2, 3)
        spool.close_events(pending(1, 2))
        assert (keys(spool), spool.newest()) == ([], 0)
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_what_is_stored_is_there_after_the_program_and_for_its_user_only(tmp_path: Path) -> None:
    with Spool(tmp_path / "s") as spool:
        assert spool.inherited == 0
        spool.add(pending(1, 2))
        spool.close_events(pending(1))
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    with Spool(tmp_path / "s") as spool:
        assert (spool.inherited, keys(spool)) == (1, ["k-2"])


def test_a_write_that_a_crash_has_torn_leaves_what_was_stored_before(tmp_path: Path) -> None:
    """The end of the log, as a power failure may leave it: cut anywhere, or with other bytes."""
    chance = random.Random(5)
    live = tmp_path / "live"
    live.mkdir()
    with Spool(live / "s") as spool:
        spool.add(pending(1, 2, size=3_000))
        before = (live / "s-wal").stat().st_size
        spool.add(pending(3, 4, size=3_000))
        after = (live / "s-wal").stat().st_size
        assert before < after
        for number in range(40):
            folder = tmp_path / f"{number}"
            shutil.copytree(live, folder)
            cut = chance.randrange(before, after)
            log = folder / "s-wal"
            log.write_bytes(log.read_bytes()[:cut] + (bytes(after - cut) if number % 2 else b""))
            with Spool(folder / "s") as torn:
                assert keys(torn) == ["k-1", "k-2"], cut


def test_a_full_spool_takes_nothing_of_a_call_and_then_goes_on(tmp_path: Path) -> None:
    with Spool(tmp_path / "s", bytes_max=128 * 1024) as spool:
        spool.add(pending(*range(10), size=5_000))
        with pytest.raises(SpoolFull, match=r"s: no room for more events: wait until open events are settled, raise"):
            spool.add(pending(*range(10, 40), size=5_000))
        assert len(spool) == 10
        for n in range(10, 200):  # the room of settled events is used again
            spool.close_events(pending(n - 10, size=5_000))
            spool.add(pending(n, size=5_000))
        assert len(spool) == 10
    assert (tmp_path / "s").stat().st_size <= 128 * 1024
    with pytest.raises(ValueError, match="bytes_max: a spool needs 65536 bytes or more, not 1000"):
        Spool(tmp_path / "s", bytes_max=1_000)


def test_another_event_under_an_open_key_is_not_taken_and_does_not_remove_the_open_one(tmp_path: Path) -> None:
    with Spool(tmp_path / "s") as spool:
        spool.add(pending(1))
        spool.close_events([Pending("k-1", b"other")])
        with pytest.raises(
            SpoolError, match="s: idempotency_key 'k-1': another event is open under it: give each event"
        ):
            spool.add([*pending(2), Pending("k-1", b"other")])
        assert keys(spool) == ["k-1"]  # nothing of the call
        row = spool.next_after(0, 9)
        assert row is not None
        assert row[1].body == b"1"
        spool.add(pending(1, 2))
        assert keys(spool) == ["k-1", "k-2"]


HOLD = """
import sys
from service.fencepost import Spool
spool = Spool(sys.argv[1])
print('open', flush=True)
sys.stdin.read()
"""


def test_a_second_program_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "s")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(SpoolInUse, match="s: another program has it open: give each program its own"):
            Spool(tmp_path / "s")
        holder.kill()


def test_a_second_client_of_one_program_is_told_to_close_the_first(tmp_path: Path) -> None:
    """As a cell of a notebook that runs again."""
    first = Spool(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "s", tmp_path / "link" / "s"):
        with pytest.raises(SpoolInUse, match=r"s: another client of this program has it open: close\(\) that"):
            Spool(path)
    first.close()
    with Spool(tmp_path / "s") as again:
        assert len(again) == 0


def test_what_cannot_be_a_spool_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a diary, and no database at all" * 100)
    with pytest.raises(SpoolError, match=r"text: .* move it away if it is no spool"):
        Spool(tmp_path / "text")
    assert (tmp_path / "text").read_text().startswith("a diary")
    with pytest.raises(SpoolError, match=r"none/s: .*: name a file in a folder that can be written to"):
        Spool(tmp_path / "none" / "s")
    with pytest.raises(SpoolError, match="unable to open"):
        Spool(tmp_path)


def test_a_closed_spool_is_not_taken_for_a_file_that_is_no_spool(tmp_path: Path) -> None:
    """The remedy for a file that is no spool, to move it away, would lose the open events."""
    spool = Spool(tmp_path / "s")
    spool.add(pending(1))
    spool.close()
    for call in (
        spool.newest,
        lambda: len(spool),
        lambda: spool.next_after(0, 9),
        lambda: spool.add(pending(2)),
        lambda: spool.close_events(pending(1)),
    ):
        with pytest.raises(SpoolError, match=r"s: it is closed: open it again, by a new client$"):
            call()
    with Spool(tmp_path / "s") as again:
        assert keys(again) == ["k-1"]


def test_a_forked_process_neither_uses_the_spool_nor_closes_it(tmp_path: Path) -> None:
    """A close in the fork would remove the log of the file, and a crash would lose what the parent adds to it then."""
    code = """
import os, sys
from service.fencepost.client import Spool, SpoolError
from service.fencepost.client.events import Pending

spool = Spool(sys.argv[1])
for number, way in enumerate(("uses", "closes", "ends")):
    spool.add([Pending(way, b"%d" % number)])
    if os.fork() == 0:
        if way == "uses":
            for call in (spool.newest, lambda: spool.add([Pending("forked", b"1")]), lambda: spool.next_after(0, 9)):
                try:
                    call()
                except SpoolError as error:
                    print(error, flush=True)
        if way == "closes":
            spool.close()
        if way == "ends":
            sys.exit()  # Python ends all that it has
        os._exit(0)
    os.wait()
spool.add([Pending("last", b"3")])
print("kept", flush=True)
os._exit(0)  # a crash: nothing is closed
"""
    path = tmp_path / "s"
    program = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert program.stderr == ""
    *refusals, end = program.stdout.splitlines()
    assert end == "kept"
    assert (
        refusals
        == [
            f"{path}: this process is a fork of the one that opened it: "
            "open a spool of its own in each process, after the fork"
        ]
        * 3
    )
    with Spool(path) as spool:
        assert keys(spool) == ["uses", "closes", "ends", "last"]
