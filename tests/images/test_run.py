"""Builds the images and runs them with their manifests, on real Kafka and Redis. Takes minutes: only on request."""

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from deploy.stack import Kafka, Redis, Service, free_port
from tests.conftest import MakeTopic
from tests.images.kubelet import Kubelet
from tests.images.load import Load, post
from tests.images.tools import BASE, Builder, Container, lacking
from tests.kubernetes.rendering import HERE, Object, Rendered, render, render_with
from tests.s3 import BUCKET
from tests.s3.backends import Moto
from tests.s3.server import Server

ASK = "TEST_IMAGES"
ADDED_BYTES_MAX = 150_000_000
EVENTS = 20
RUN_S = 1200.0  # a run of the audit with a lake on S3, on a machine that does other things too

pytestmark = [
    pytest.mark.skipif(not os.environ.get(ASK), reason=f"takes minutes: {ASK}=1 ./tests/run tests/images"),
    pytest.mark.skipif(bool(lacking()), reason=lacking() or "all is there"),
    pytest.mark.timeout(2400),
]


@pytest.fixture(scope="module")
def builder() -> Builder:
    found = Builder()
    found.ensure_base()
    return found


@pytest.fixture(scope="module")
def service_image(builder: Builder) -> str:
    return builder.build("service")


@pytest.fixture(scope="module")
def spark_image(builder: Builder) -> str:
    return builder.build("spark")


@pytest.fixture(scope="module")
def spark_s3_image(builder: Builder) -> str:
    return builder.build("spark-s3")


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    server = Server(Moto())
    yield server
    server.stop()


@pytest.fixture(scope="module")
def prod() -> Rendered:
    return Rendered("prod", render(HERE / "overlays" / "prod"))


@pytest.fixture
def settings(kafka: Kafka, redis: Redis, namespace: str) -> Mapping[str, str]:
    """Return the settings that differ from the manifests: the addresses of the stack, unique names and ports."""
    return {
        "FENCEPOST_KAFKA": kafka.bootstrap,
        "FENCEPOST_REDIS": redis.url,
        "FENCEPOST_NAMESPACE": namespace,
        "FENCEPOST_PORT": str(free_port()),
    }


def rules_of(prod: Rendered, folder: Path) -> Path:
    """Write the folder as which the rules' ConfigMap is mounted."""
    (rules,) = (found["data"] for name, found in prod.of("ConfigMap").items() if name.startswith("fencepost-rules"))
    folder.mkdir()
    for name, text in rules.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def pod(
    builder: Builder, service_image: str, prod: Rendered, settings: Mapping[str, str], tmp_path: Path
) -> Iterator[Kubelet]:
    """Start the service and wait for its startup probe."""
    template: Object = prod.one("Deployment")["spec"]["template"]
    name = f"fencepost-{os.getpid()}-{time.monotonic_ns() % 10**6}"
    environment = prod.settings(template["spec"]["containers"][0]) | {"FENCEPOST_INSTANCE": name} | dict(settings)
    with builder.root_of(service_image) as root:
        container = Container(
            root=root,
            image=builder.config(service_image),
            pod=template["spec"],
            name=name,
            folder=tmp_path / "container",
            env=environment,
            binds={"/etc/fencepost": rules_of(prod, tmp_path / "rules")},
        )
        with Kubelet(container, int(settings["FENCEPOST_PORT"])) as kubelet:
            kubelet.wait_started(60)
            yield kubelet


def test_the_service_adds_little_to_its_base(
    builder: Builder, service_image: str, record_property: Callable[[str, object], None]
) -> None:
    added = builder.size(service_image) - builder.size(BASE)
    record_property("added_mb", round(added / 1e6))
    assert 0 < added < ADDED_BYTES_MAX


def test_the_container_is_as_confined_as_the_manifest_says(pod: Kubelet) -> None:
    context = pod.container.pod["securityContext"]
    shown = dict(line.split(":", 1) for line in pod.container.exec("cat", "/proc/1/status").splitlines() if ":" in line)
    assert set(shown["Uid"].split()) == {str(context["runAsUser"])}
    assert set(shown["Gid"].split()) == {str(context["runAsGroup"])}
    assert [int(shown[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")] == [0] * 5
    assert shown["NoNewPrivs"].strip() == "1"
    assert shown["Seccomp"].strip() == "2"  # a filter
    for place in ("/app/x", "/opt/fencepost/x", "/etc/fencepost/x", "/tmp/x"):
        assert "Read-only file system" in pod.container.exec("touch", place), place
    assert pod.probe("livenessProbe")
    assert pod.probe("readinessProbe")


def test_an_end_under_load_leaves_no_doubt(
    pod: Kubelet, settings: Mapping[str, str], kafka: Kafka, redis: Redis, make_topic: MakeTopic, tmp_path: Path
) -> None:
    topic = make_topic(partitions=1)
    load = Load(port=pod.port, topic=topic, clients=16)
    load.start()
    time.sleep(5)
    assert pod.failures == []
    code, took_s = pod.end(load.no_new_connections)
    load.join(timeout_s=30)
    summary = f"ended with {code} after {took_s:.1f} s; answers {dict(load.statuses)}, unanswered {load.unanswered}"
    assert code == 0, summary
    assert len(load.committed) > 100
    assert set(load.statuses) <= {201, 503}, summary  # a 504 would be a doubt
    # Another process gives the same answer for every key, and Kafka has each event once.
    with Service(tmp_path, kafka=kafka.bootstrap, redis=redis.url, env=without_places(settings)) as other:
        connection = http.client.HTTPConnection("127.0.0.1", other.port, timeout=30)
        for key, offset in load.committed.items():
            status, body, _ = post(connection, topic, key)
            assert (status, body["offset"]) == (201, offset), key
        connection.close()
    delivered = Counter(values(kafka, topic))
    assert set(delivered.values()) == {1}
    # Every accepted request was answered: those without an answer met a connection that was being closed, and their
    # events are not in Kafka.
    assert set(delivered) == set(load.committed), summary
    assert len(load.unanswered) <= load.clients, summary


def without_places(settings: Mapping[str, str]) -> dict[str, str]:
    return {"FENCEPOST_NAMESPACE": settings["FENCEPOST_NAMESPACE"]}


def values(kafka: Kafka, topic: str) -> Iterator[str]:
    """Read all committed records of a topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "group.id": "none",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,  # the last offset may be that of a marker, which is not returned
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        while (message := consumer.poll(30)) is not None:
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF
                return
            yield json.loads(message.value() or b"")
        raise AssertionError("the broker does not answer")
    finally:
        consumer.close()


def as_the_operator_starts_it(application: Object, conf: Mapping[str, str]) -> list[str]:
    """Return the driver's command of the Spark Operator, with further settings and a master that needs no cluster."""
    template = application["spec"]["template"]
    command = ["driver", "--master", "local[1]"]
    for name, value in {**template["sparkConf"], **conf}.items():
        if not name.startswith("spark.kubernetes."):
            command += ["--conf", f"{name}={value}"]
    runner = ["--class", "org.apache.spark.deploy.PythonRunner", template["mainApplicationFile"]]
    return [*command, *runner, *template["arguments"]]


def write_events(tmp_path: Path, settings: Mapping[str, str], topic: str) -> None:
    """Have a service write EVENTS events."""
    kafka, redis = settings["FENCEPOST_KAFKA"], settings["FENCEPOST_REDIS"]
    with Service(tmp_path, kafka=kafka, redis=redis, env=without_places(settings)) as service:
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
        for number in range(EVENTS):
            assert post(connection, topic, str(number))[0] == 201
        connection.close()


def audit_pod(
    prod: Rendered, operator: bool, tmp_path: Path, options: Sequence[str] = (), conf: Mapping[str, str] | None = None
) -> Object:
    """Return the audit's pod with further options, as the CronJob or the operator starts it.

    `conf`: settings of Spark in the operator's manifest.
    """
    spec = prod.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    container_spec = dict(spec["containers"][0])
    if operator:
        (tmp_path / "operated").mkdir()
        operated = Rendered("operated", render_with("prod", tmp_path / "operated", "spark-operator"))
        application = operated.one("ScheduledSparkApplication", "fencepost-audit")
        container_spec["args"] = as_the_operator_starts_it(application, conf or {})
    container_spec["args"] = [*container_spec["args"], *options]
    return {**spec, "containers": [container_spec]}


def run_audit(
    builder: Builder, image: str, prod: Rendered, spec: Object, settings: Mapping[str, str], binds: Mapping[str, Path]
) -> None:
    """Run the audit's pod until its end, with folders in place of its volumes."""
    data = binds["/data"]
    data.mkdir()
    os.chown(data, -1, spec["securityContext"]["fsGroup"])  # as a kubelet does with the volume
    data.chmod(0o2775)
    with builder.root_of(image) as root:
        container = Container(
            root=root,
            image=builder.config(image),
            pod=spec,
            name=f"fencepost-audit-{os.getpid()}-{time.monotonic_ns() % 10**6}",
            folder=data.parent / "container",
            env=prod.settings(spec["containers"][0]) | dict(settings),
            binds={**binds, "/etc/fencepost": rules_of(prod, data.parent / "rules")},
        )
        container.start()
        try:
            code = container.wait(RUN_S)
        finally:
            container.remove()
    assert code == 0, container.log.read_text()[-4000:]


@pytest.fixture(params=[False, True], ids=["cron job", "spark operator"])
def operator(request: pytest.FixtureRequest) -> bool:
    """Whether the Spark Operator starts the audit."""
    return bool(request.param)


@pytest.fixture
def written(settings: Mapping[str, str], make_topic: MakeTopic, tmp_path: Path) -> Mapping[str, str]:
    """Have a service write EVENTS events; return its settings."""
    write_events(tmp_path, settings, make_topic())
    return settings


def check_clean(report: Mapping[str, Any]) -> None:
    """Check that the audit has found each event once, and nothing else."""
    assert report["run"]["verdict"] == "clean"
    assert report["balance"]["delivered_once"] == EVENTS


def test_the_audit_runs_as_its_manifest_says(
    operator: bool, builder: Builder, spark_image: str, prod: Rendered, written: Mapping[str, str], tmp_path: Path
) -> None:
    run_audit(builder, spark_image, prod, audit_pod(prod, operator, tmp_path), written, {"/data": tmp_path / "data"})
    folder = tmp_path / "data" / "report"
    check_clean(json.loads((folder / "report.json").read_text()))
    assert "fencepost_audit_clean 1" in (folder / "metrics.prom").read_text()


def test_the_audit_keeps_its_lake_on_s3(
    operator: bool,
    builder: Builder,
    spark_s3_image: str,
    s3: Server,
    prod: Rendered,
    written: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """The pod of the CronJob has the settings of S3 from its secret, that of the operator from the manifest."""
    folder = f"{written['FENCEPOST_NAMESPACE']}/audit"
    options = [f"--lake=s3a://{BUCKET}/{folder}/lake", f"--report=s3a://{BUCKET}/{folder}/report"]
    conf = {f"spark.hadoop.{name}": value for name, value in s3.settings().items()}
    secret = tmp_path / "secret"
    secret.mkdir()
    if not operator:
        (secret / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in conf.items()))
    binds = {"/data": tmp_path / "data", "/etc/fencepost-audit": secret}
    run_audit(builder, spark_s3_image, prod, audit_pod(prod, operator, tmp_path, options, conf), written, binds)
    check_clean(json.loads(s3.get(f"{folder}/report/report.json") or b"{}"))
    assert s3.count("PUT", f"{folder}/lake/runs/_delta_log/{0:020}.json") == 1
    assert list((tmp_path / "data").iterdir()) == []
