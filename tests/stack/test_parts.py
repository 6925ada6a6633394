"""Tests each part of the stack with the real programs."""

import threading
import urllib.request
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from deploy import places
from deploy.stack import Kafka, Redis, StackError
from tests import broker_classes
from tests.conftest import MakeTopic, top_level


def test_kafka_answers_and_makes_topics(kafka: Kafka, make_topic: MakeTopic) -> None:
    name = make_topic(partitions=3, config={"retention.ms": "1000"})
    assert name in kafka.topics()
    with pytest.raises(StackError, match="already exists"):
        kafka.create_topic(name)


def test_a_broker_takes_its_classes_from_where_they_were_recorded(kafka: Kafka) -> None:
    kept = broker_classes.archive()
    if not kept.exists():
        pytest.skip("python -m tests.broker_classes was not run here; ./tests/run does")
    assert str(kept.resolve()) in Path(f"/proc/{kafka.pid}/maps").read_text()


def test_redis_keeps_nothing_over_a_restart_but_tells_a_new_run_id(own_redis: Redis) -> None:
    with own_redis.client() as client:
        client.set("a", "1")
        before = client.info()["run_id"]
    own_redis.kill()
    own_redis.start()
    with own_redis.client() as client:
        assert client.get("a") is None
        assert client.info()["run_id"] != before


def test_redis_with_a_log_keeps_what_it_had(tmp_path: Path) -> None:
    with Redis(tmp_path, args=["--appendonly", "yes", "--appendfsync", "always"]) as server:
        with server.client() as client:
            client.set("a", "1")
        server.kill()
        server.start()
        with server.client() as client:
            assert client.get("a") == b"1"
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_redis_saves_into_its_own_folder_whatever_the_current_one_is(own_redis: Redis) -> None:
    with own_redis.client() as client:
        client.save()
    assert (own_redis.folder / "dump.rdb").exists()


def test_a_file_that_is_left_in_the_top_folder_is_seen_and_a_cache_is_not(tmp_path: Path) -> None:
    (tmp_path / ".gitignore").write_text("__pycache__/\n*.egg-info/\n/.local/\n")
    for name in ("README.md", "__pycache__", "fencepost.egg-info", ".local"):
        (tmp_path / name).mkdir()
    before = top_level(tmp_path)
    assert before == {".gitignore", "README.md"}
    (tmp_path / "dump.rdb").touch()
    assert top_level(tmp_path) - before == {"dump.rdb"}


def test_no_file_of_a_server_is_in_the_project() -> None:
    saved = {".rdb", ".aof"}
    assert [name for name in top_level(places.ROOT) if Path(name).suffix in saved] == []


def test_no_proxy_stands_between_a_test_and_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process, and for those that it starts."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/pyproject.toml"
        try:
            assert httpx.head(url).is_success
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as response:
                assert response.status == 200
        finally:
            server.shutdown()
            thread.join()
