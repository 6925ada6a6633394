"""Tests the log store for S3: of the commits of one version one wins, whatever the other processes do and when."""

import gc
import json
import os
import signal
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
from py4j.protocol import Py4JError, Py4JJavaError  # type: ignore[import-untyped]

from tests.s3.server import Server
from tests.s3.writers import DELTAS_OWN, Writer

RACES = 100


@pytest.fixture
def log() -> str:
    """The folder of a log that no other test has."""
    return f"{uuid.uuid4().hex}/_delta_log"


def together(commits: Sequence[Callable[[], bool]]) -> list[bool]:
    """Call functions in threads that start at the same moment, and return their results."""
    start = threading.Barrier(len(commits))

    def begin(commit: Callable[[], bool]) -> bool:
        start.wait(30)
        return commit()

    with ThreadPoolExecutor(len(commits)) as threads:
        return list(threads.map(begin, commits))


def in_background(commit: Callable[[], bool]) -> "Future[bool]":
    threads = ThreadPoolExecutor(1)
    result = threads.submit(commit)
    threads.shutdown(wait=False)
    return result


def test_of_two_processes_one_commits_each_version(server: Server, writers: tuple[Writer, Writer], log: str) -> None:
    wins = [0, 0]
    for version in range(RACES):
        name = f"{log}/{version:020}.json"
        won = together([partial(writer.commit, name, f"by {n}", "x") for n, writer in enumerate(writers)])
        assert sorted(won) == [False, True], version
        winner = won.index(True)
        assert server.get(name) == f"by {winner}\nx\n".encode()
        wins[winner] += 1
    assert sum(wins) == RACES


def test_two_puts_that_arrive_at_once_are_told_apart(server: Server, writers: tuple[Writer, Writer], log: str) -> None:
    """Both have found no object before."""
    name = f"{log}/0.json"
    with server.holding(name, 2) as held:
        results = [in_background(partial(writer.commit, name, f"by {n}")) for n, writer in enumerate(writers)]
        held.wait()
        held.release()
        won = [result.result(60) for result in results]
    assert sorted(won) == [False, True]
    assert server.get(name) == f"by {won.index(True)}\n".encode()


def test_deltas_own_log_store_lets_both_commit(server: Server, log: str) -> None:
    """Why the job has one of its own: of the two commits that are reported as written one is gone."""
    name = f"{log}/0.json"
    with (
        Writer(server.settings(), DELTAS_OWN) as first,
        Writer(server.settings(), DELTAS_OWN) as second,
        server.holding(name, 2) as held,
    ):
        results = [in_background(partial(writer.commit, name, "x")) for writer in (first, second)]
        held.wait()
        held.release()
        assert [result.result(60) for result in results] == [True, True]


@pytest.mark.parametrize("stopped", [False, True], ids=["its PUT is on the way", "its process is stopped"])
def test_a_suspended_process_does_not_replace_the_commit_of_the_next(
    server: Server, writers: tuple[Writer, Writer], log: str, stopped: bool
) -> None:
    suspended, heir = writers
    name = f"{log}/7.json"
    with server.holding(name) as held:
        result = in_background(partial(suspended.commit, name, "late"))
        held.wait()
        if stopped:
            os.kill(suspended.process.pid, signal.SIGSTOP)
        assert heir.commit(name, "in time")
        held.release()
        if stopped:
            os.kill(suspended.process.pid, signal.SIGCONT)
        assert result.result(60) is False
    assert server.get(name) == b"in time\n"
    assert suspended.commit(f"{log}/8.json", "after it")


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_process_that_is_killed_amid_a_commit_leaves_it_whole_or_not_at_all(
    server: Server, writers: tuple[Writer, Writer], log: str
) -> None:
    _, heir = writers
    name = f"{log}/3.json"
    with Writer(server.settings()) as killed, server.holding(name) as held:
        result = in_background(partial(killed.commit, name, "first", "second"))
        held.wait()
        killed.process.kill()
        with pytest.raises(Py4JError):
            result.result(60)
        del result
        gc.collect()  # py4j leaves the socket open by which it tries to reach the killed JVM again
        assert server.get(name) is None
    # The server had the request, and carries it out after the death of its process.
    assert heir.commit(name, "heir") is False
    assert server.get(name) == b"first\nsecond\n"


def test_a_commit_whose_reply_was_lost_has_won(server: Server, writers: tuple[Writer, Writer], log: str) -> None:
    """The repeated PUT is refused because of the first one."""
    first, second = writers
    name = f"{log}/1.json"
    server.lose_reply(name)
    assert first.commit(name, "first")
    assert server.count("PUT", name) == 2
    assert second.commit(name, "second") is False
    assert server.get(name) == b"first\n"


def test_a_commit_of_unknown_outcome_is_an_error_and_no_conflict(
    server: Server, writers: tuple[Writer, Writer], log: str
) -> None:
    """Delta would write a conflict's commit again, as another version."""
    first, second = writers
    name = f"{log}/1.json"
    with server.refusing(name), pytest.raises(Py4JJavaError, match="AWSStatus500Exception"):
        first.commit(name, "first")
    assert second.commit(name, "second")


def test_lines_that_end_in_an_error_leave_no_object(server: Server, writers: tuple[Writer, Writer], log: str) -> None:
    first, _ = writers
    with pytest.raises(Py4JJavaError, match="ClassCastException"):
        first.commit(f"{log}/1.json", "a line", 7)
    assert server.get(f"{log}/1.json") is None


def test_a_commit_of_many_parts_is_conditional_too(server: Server, log: str) -> None:
    """hadoop-aws uploads in parts what is longer than a block; the last request of the upload has the condition."""
    settings = server.settings() | {"fs.s3a.multipart.size": "5M", "fs.s3a.multipart.threshold": "5M"}
    line = json.dumps({"add": "x" * 1_000_000})
    with Writer(settings) as writer:
        assert writer.commit(f"{log}/1.json", *[line] * 12)
        assert writer.commit(f"{log}/1.json", *[line.replace("x", "y")] * 12) is False
    content = server.get(f"{log}/1.json")
    assert content == f"{line}\n".encode() * 12


def test_the_pointer_to_the_last_checkpoint_is_replaced(
    server: Server, writers: tuple[Writer, Writer], log: str
) -> None:
    for number, writer in enumerate(writers):
        assert writer.commit(f"{log}/_last_checkpoint", f"{number}", overwrite=True)
    assert server.get(f"{log}/_last_checkpoint") == b"1\n"
