"""Tests that the loop of kills counts unreadable events, keeps a line for each tree, and runs a service of another."""

import json
from pathlib import Path

from deploy import places
from deploy.stack import Service
from tests.faults.hanging import Kill, invisible, write
from tests.faults.history import Log, Result, single
from tests.integration.client import Asked

END_S = 10.0


def test_events_behind_what_stands_are_counted_once_each(tmp_path: Path) -> None:
    log = Log(tmp_path / "client.jsonl")
    for partition, offset in [(0, 4), (0, 5), (0, 5), (1, 9), (2, 6)]:
        metadata = json.dumps({"topic": "t", "partition": partition, "offset": offset})
        n = log.invoke(single(Asked("key", "t", b"1")), "service-0")
        log.answer(n, 201, [Result("ok", 201, metadata=metadata)], metadata)
    log.answer(log.invoke(single(Asked("doubtful", "t", b"1")), "service-0"), 504, [Result("info", 504)], "")
    log.close()
    assert invisible(tmp_path, {("t", 0): 5, ("t", 2): 7}) == 1
    assert invisible(tmp_path, {("t", 0): 4, ("t", 1): 0}) == 3
    assert invisible(tmp_path, {}) == 0


def test_each_tree_and_number_of_brokers_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "hanging.md"
    write(
        places.ROOT,
        1,
        [Kill(2, 4, {("t", 0): 3, ("t", 1): 5}, 20.0, 1_500, 7, []), Kill(0, 0, {}, 1.0, 500, 0, [])],
        path,
    )
    write(places.ROOT, 3, [Kill(0, 0, {}, 1.0, 100, 0, ["once: lost"])], path)
    one, three = [line.split(" | ")[1:10] for line in path.read_text().splitlines()[-2:]]
    assert one == ["2", "1", "2", "4", "1", "2", "2,000", "7", "0"]
    assert three == ["1", "0", "0", "0", "0", "0", "100", "0", "1"]
    notes = "\n## Notes\n\nThe second kill.\n"
    path.write_text(path.read_text() + notes)
    write(places.ROOT, 1, [Kill(0, 0, {}, 1.0, 9, 0, [])], path)
    assert path.read_text().endswith(notes)
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[7] for line in lines[-2:]] == ["9", "100"]


def test_the_service_of_another_tree_runs_with_its_own_interpreter(tmp_path: Path) -> None:
    python = tmp_path / "tree" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$PWD: $*"\n')
    python.chmod(0o755)
    service = Service(tmp_path / "logs", kafka="", redis="", project=tmp_path / "tree")
    service.start(wait_ready=False)
    service.wait(END_S)
    assert service.log.read_text() == f"{tmp_path / 'tree'}: -m service\n"
