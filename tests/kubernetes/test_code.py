"""Tests that the manifests agree with the code: settings, probes, ports, times, numbers."""

import base64
import copy
import math
import os
import re
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast
from zoneinfo import ZoneInfo

import pytest
from fastapi import FastAPI

from deploy.places import ROOT
from service.contract import Rules
from service.contract.wire.names import INSTANCE
from service.core.settings import Settings
from service.http.routes import Parts, add_probes
from service.kafka.topics import EXTRA_S, WEEK_S
from spark.__main__ import EXIT_CANNOT_RUN
from spark.cli.command_line import parse
from spark.engine.session import _ALWAYS, _LOCAL, UTC
from spark.errors import CannotRun
from spark.rules.balance import Balance
from tests.kubernetes.rendering import HERE, Object, Rendered, container_of, render_with
from tests.kubernetes.times import drain_s, way_out_s

OF_SERVICE: Final = set(Settings.variables())
# The job has no table of its own settings; these are the names that its modules read.
OF_JOB: Final = {
    name for file in (ROOT / "spark").rglob("*.py") for name in re.findall(r"FENCEPOST_[A-Z_]+\b", file.read_text())
}
POD_NAME_CHARS: Final = 63  # the longest name of a Deployment's pod in Kubernetes
# From the deletion of a pod until all nodes know of it; the preStop hook waits for this time.
ENDPOINTS_S: Final = 5


@pytest.fixture
def pod(rendered: Rendered) -> Object:
    """Return the template of the service's pods."""
    return rendered.one("Deployment")["spec"]["template"]  # type: ignore[no-any-return]


@pytest.fixture
def settings(rendered: Rendered, pod: Object, tmp_path: Path) -> Settings:
    """Return the service's settings as a pod reads them."""
    environ = rendered.settings(container_of(pod))
    environ["FENCEPOST_INSTANCE"] = "f" * (POD_NAME_CHARS - 17) + "-5d4f8c7b9d-x2x8k"
    environ["FENCEPOST_REDIS"] = redis_url(rendered)
    rules = tmp_path / "rules.toml"
    rules.write_text(mounted(rendered, pod, environ["FENCEPOST_RULES"]))
    return Settings.from_env({**environ, "FENCEPOST_RULES": str(rules)})


def redis_url(rendered: Rendered) -> str:
    """Return the URL in the secret; for a secret that is made elsewhere, the expected one."""
    for name, secret in rendered.of("Secret").items():
        if name.startswith("fencepost-redis"):
            return base64.b64decode(secret["data"]["url"]).decode()
    return "rediss://:secret@redis.example:6379/0"


def mounted(rendered: Rendered, template: Object, path: str) -> str:
    """Read a file that a ConfigMap mounts into the pod."""
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    for mount in container_of(template)["volumeMounts"]:
        if Path(path).is_relative_to(mount["mountPath"]):
            name = volumes[mount["name"]]["configMap"]["name"]
            return str(rendered.of("ConfigMap")[name]["data"][Path(path).name])
    raise AssertionError(f"{path} is not mounted")


# ------------------------------------------------------------------------------------------------------- settings


def test_every_variable_of_the_service_is_a_setting(rendered: Rendered, pod: Object) -> None:
    names = set(rendered.settings(container_of(pod)))
    assert {"FENCEPOST_KAFKA", "FENCEPOST_REDIS", "FENCEPOST_INSTANCE"} <= names
    assert names <= OF_SERVICE


def test_every_variable_of_the_audit_is_one_that_it_or_the_service_reads(rendered: Rendered) -> None:
    audit = container_of(rendered.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]["template"])
    assert set(rendered.settings(audit)) <= OF_SERVICE | OF_JOB


def test_service_and_audit_read_the_same_map(rendered: Rendered, operated: Rendered, pod: Object) -> None:
    ours = container_of(pod)["envFrom"]
    audit = container_of(rendered.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]["template"])
    assert audit["envFrom"] == ours
    application = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
    (name,) = (source["configMapRef"]["name"] for source in application["driver"]["envFrom"])
    assert name in operated.of("ConfigMap")


def test_the_settings_are_right_together(settings: Settings) -> None:
    assert settings.host == "0.0.0.0"
    Rules.read(settings.rules)


def test_no_secret_is_in_a_config_map(rendered: Rendered) -> None:
    for name, found in rendered.of("ConfigMap").items():
        assert not set(found["data"]) & {"FENCEPOST_REDIS"}, name


def test_the_instance_is_the_pods_name(pod: Object) -> None:
    (variable,) = (each for each in container_of(pod)["env"] if each["name"] == "FENCEPOST_INSTANCE")
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert INSTANCE.fullmatch("x" * POD_NAME_CHARS)


def test_the_namespace_of_the_settings_is_the_one_that_the_runbook_speaks_of(settings: Settings) -> None:
    assert settings.namespace == "fencepost"


# --------------------------------------------------------------------------------------------------- probes, ports


def test_probes_ask_routes_that_there_are(pod: Object) -> None:
    app = FastAPI()
    add_probes(app, cast(Parts, None))
    paths = {getattr(route, "path", "") for route in app.routes}
    container = container_of(pod)
    asked = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert asked == {"startupProbe": "/startupz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert set(asked.values()) <= paths
    assert "/metrics" in paths


def test_the_ports_of_container_probes_and_service_agree(rendered: Rendered, pod: Object, settings: Settings) -> None:
    container = container_of(pod)
    (port,) = container["ports"]
    assert port["containerPort"] == settings.port
    assert {container[name]["httpGet"]["port"] for name in container if name.endswith("Probe")} == {port["name"]}
    (of_service,) = rendered.one("Service")["spec"]["ports"]
    assert of_service["targetPort"] == port["name"]


def test_with_a_management_port_probes_and_scrapes_go_there_and_callers_do_not(managed: Rendered) -> None:
    container = container_of(managed.one("Deployment")["spec"]["template"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    settings = managed.settings(container)
    assert ports == {"http": int(settings["FENCEPOST_PORT"]), "management": int(settings["FENCEPOST_MANAGEMENT_PORT"])}
    assert {container[name]["httpGet"]["port"] for name in container if name.endswith("Probe")} == {"management"}
    of_service = {port["name"]: port["targetPort"] for port in managed.one("Service")["spec"]["ports"]}
    assert of_service == {"http": "http", "management": "management"}
    assert [each["port"] for each in managed.one("ServiceMonitor")["spec"]["endpoints"]] == ["management"]
    allowed = {"fencepost-prometheus": "management", "fencepost-clients": "http", "fencepost-prometheus-report": "http"}
    for name, port in allowed.items():
        (rule,) = managed.one("NetworkPolicy", name)["spec"]["ingress"]
        assert [each["port"] for each in rule["ports"]] == [port], name


def test_the_network_policy_lets_the_service_reach_what_its_settings_name(
    rendered: Rendered, settings: Settings
) -> None:
    kafka = {int(server.rpartition(":")[2]) for server in settings.kafka.split(",")}
    assert open_ports(rendered, "fencepost-kafka") == kafka
    assert open_ports(rendered, "fencepost-redis") == {int(re.findall(r":(\d+)/", settings.redis)[0])}
    assert open_ports(rendered, "fencepost-dns") == {53}


def open_ports(rendered: Rendered, policy: str) -> set[int]:
    spec = rendered.one("NetworkPolicy", policy)["spec"]
    assert all(rule["to"] for rule in spec["egress"])  # no rule without destination
    return {port["port"] for rule in spec["egress"] for port in rule["ports"]}


def test_all_is_denied_that_is_not_allowed(rendered: Rendered) -> None:
    denied = rendered.one("NetworkPolicy", "fencepost-default-deny")["spec"]
    assert set(denied) == {"podSelector", "policyTypes"}
    assert sorted(denied["policyTypes"]) == ["Egress", "Ingress"]
    for name, template in rendered.pods():
        assert selects(denied["podSelector"], template["metadata"]["labels"]), name
    outward = [name for name, policy in rendered.of("NetworkPolicy").items() if "egress" in policy["spec"]]
    assert sorted(outward) == ["fencepost-dns", "fencepost-kafka", "fencepost-redis"]


# ------------------------------------------------------------------------------------------------- times, numbers


def test_the_grace_is_longer_than_the_drain_and_the_drain_than_a_request(pod: Object, settings: Settings) -> None:
    wait_s = container_of(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait_s >= ENDPOINTS_S
    assert pod["spec"]["terminationGracePeriodSeconds"] > wait_s + way_out_s(settings)
    assert way_out_s(settings) > drain_s(settings) > settings.request_timeout_ms / 1000


def test_the_most_pods_that_there_can_be_have_a_slot_each(rendered: Rendered, settings: Settings) -> None:
    most = most_pods(rendered)
    assert most <= settings.slots_max
    # And more: an update must take no slots from the pods that stay.
    assert most * settings.slots <= settings.slots_max


def most_pods(rendered: Rendered) -> int:
    replicas = rendered.one("HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    update = rendered.one("Deployment")["spec"]["strategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 0
    surge = update["maxSurge"]
    more = math.ceil(replicas * int(surge.rstrip("%")) / 100) if isinstance(surge, str) else surge
    assert more >= 1
    return int(replicas + more)


def test_the_autoscaler_has_the_say_and_lets_go_slowly(rendered: Rendered) -> None:
    deployment = rendered.one("Deployment")
    assert "replicas" not in deployment["spec"]
    scaler = rendered.one("HorizontalPodAutoscaler")["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    down = scaler["behavior"]["scaleDown"]
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert down["stabilizationWindowSeconds"] >= 300
    assert all(policy["value"] == 1 and policy["periodSeconds"] > grace_s for policy in down["policies"])


def test_the_queue_fits_into_the_memory(pod: Object, settings: Settings) -> None:
    limit = container_of(pod)["resources"]["limits"]["memory"]
    assert limit == "1Gi"
    # The parts of a body are joined, and a batch's events refer to it until they are written.
    assert 4 * settings.queue_bytes_max + 2 * settings.bodies_bytes_max < 1 << 30


def test_the_audit_runs_every_hour_and_never_twice_at_a_time(rendered: Rendered) -> None:
    cron = rendered.one("CronJob", "fencepost-audit")["spec"]
    ZoneInfo(cron["timeZone"])
    assert cron["concurrencyPolicy"] == "Forbid"
    assert re.fullmatch(r"\d+ \* \* \* \*", cron["schedule"])  # hourly; the times below depend on that
    job = cron["jobTemplate"]["spec"]
    assert 0 < cron["startingDeadlineSeconds"] < 3600
    assert 0 < job["activeDeadlineSeconds"] < 3600
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    fails = [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert fails == [[3]]  # findings; other failures may be tried again
    assert EXIT_CANNOT_RUN not in fails[0]


def test_the_audits_command_is_one_that_it_takes(rendered: Rendered, operated: Rendered) -> None:
    job = rendered.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]
    container = container_of(job["template"])
    assert container["args"][:3] == ["python", "-m", "spark"]
    options = parse(container["args"][3:])
    writable = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    for place in (options.lake, options.report):
        assert any(Path(place).is_relative_to(mount) for mount in writable)
    application = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]
    assert parse(application["template"]["arguments"]) == options
    cron = rendered.one("CronJob", "fencepost-audit")["spec"]
    for name in ("schedule", "timeZone", "concurrencyPolicy"):
        assert application[name] == cron[name]


def test_the_spark_operator_takes_the_cron_jobs_place(operated: Rendered) -> None:
    assert not operated.of("CronJob")
    locked = re.findall(r"spark-sql-kafka-0-10_[\d.]+:([\d.]+)", (ROOT / "spark" / "engine" / "jars.lock").read_text())
    assert [operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]["sparkVersion"]] == locked


def test_the_operator_s_spark_conf_has_the_settings_of_a_local_job(operated: Rendered) -> None:
    template = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
    conf = template["sparkConf"]
    cores = template["executor"]["instances"] * template["executor"]["cores"]
    by_default = {"spark.sql.shuffle.partitions": 200, "spark.databricks.delta.snapshotPartitions": 50}
    for name, default in by_default.items():
        assert name in _LOCAL
        assert 1 <= int(conf[name]) <= 2 * cores < default
    assert not set(conf) & set(_ALWAYS)  # the job sets those on every master
    for side in ("driver", "executor"):
        (path,) = re.findall(r"-Dlog4j2\.configurationFile=file:///app/(\S+)", conf[f"spark.{side}.extraJavaOptions"])
        assert (ROOT / path).is_file()  # COPY spark /app/spark
        assert UTC in conf[f"spark.{side}.extraJavaOptions"].split()
    assert "COPY spark /app/spark" in (ROOT / "Dockerfile").read_text()


def test_the_audit_that_goes_on_has_the_pod_of_the_cron_job(
    followed: Rendered, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert not followed.of("CronJob")
    deployment = followed.one("Deployment", "fencepost-audit")["spec"]
    # One run at a time holds the lake, and one node the volume.
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    secured = Rendered("secured", render_with("prod", tmp_path_factory.mktemp("secured"), "kafka-sasl-tls"))
    job: Any = copy.deepcopy(secured.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]["template"])
    pod: Any = copy.deepcopy(deployment["template"])
    ours, theirs = container_of(pod), container_of(job)
    options, hourly = parse(ours["args"][3:]), parse(theirs["args"][3:])
    assert options.follow
    assert replace(options, follow=False, alive_file="") == hourly
    (scratch,) = (mount for mount in ours["volumeMounts"] if mount["name"] == "scratch")
    assert Path(options.alive_file).is_relative_to(scratch["mountPath"])
    command = ours.pop("livenessProbe")["exec"]["command"]
    # A step of a run takes less than the deadline of a whole run of the CronJob.
    assert command[-1] == f"find {options.alive_file} -mmin -50 | grep -q ."
    for each, container in ((pod, ours), (job, theirs)):
        del container["args"]
        each["spec"].pop("restartPolicy", None)
        del each["spec"]["terminationGracePeriodSeconds"]
    assert pod == job


def test_the_file_of_an_audit_that_goes_on_says_whether_it_is_alive(tmp_path: Path, followed: Rendered) -> None:
    pod = followed.one("Deployment", "fencepost-audit")["spec"]["template"]
    command = container_of(pod)["livenessProbe"]["exec"]["command"]
    alive, now_s = tmp_path / "alive", time.time()
    command = [part.replace("/tmp/alive", str(alive)) for part in command]

    def status() -> int:
        return subprocess.run(command, capture_output=True, check=False, timeout=10).returncode

    assert status() != 0
    alive.touch()
    assert status() == 0
    os.utime(alive, (now_s, now_s - 3000 - 60))
    assert status() != 0


def test_the_window_of_the_audit_is_no_multiple_of_a_daily_or_weekly_period(rendered: Rendered) -> None:
    """The alert for duplicates compares numbers, which would stay the same for a job that fails each night."""
    job = rendered.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]
    window_h = parse(container_of(job["template"])["args"][3:]).window_h
    assert window_h > 168
    for period_h in (2, 3, 4, 6, 8, 12, 24, 168):
        assert window_h % period_h, period_h
    assert window_h * 3600 < WEEK_S + EXTRA_S  # the service keeps ledger and journal at least that long


def test_the_scheduled_audit_bounds_the_days_and_files_that_it_keeps(
    rendered: Rendered, operated: Rendered, settings: Settings
) -> None:
    """Its volume has a size, and the pass over ids a deadline; a MERGE leaves the files that it replaces."""
    job = rendered.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]
    application = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]
    for arguments in (container_of(job["template"])["args"][3:], application["template"]["arguments"]):
        options = parse(arguments)
        assert options.keep_days is not None
        assert options.keep_days * 86_400 > settings.key_ttl_s
        assert options.vacuum_h is not None
        # A backlog is read in runs that end before their deadline.
        assert options.max_records is not None
        assert options.optimize


# Prefix of volume names that Spark uses for its scratch files.
SCRATCH: Final = "spark-local-dir-"


def mounted_by_spark(template: Object, side: str) -> list[str]:
    """List where Spark mounts volumes in its pods: its settings, and scratch space unless one is given."""
    scratch = [mount for mount in template[side]["volumeMounts"] if mount["name"].startswith(SCRATCH)]
    dirs = template["sparkConf"].get("spark.local.dir", "/var/data/spark-some-uuid").split(",")
    return ["/opt/spark/conf", *([] if scratch else dirs)]


@pytest.mark.parametrize("side", ["driver", "executor"])
def test_no_path_is_mounted_twice_where_spark_mounts_too(
    operated: Rendered, secured_operated: Rendered, side: str
) -> None:
    for rendered in (operated, secured_operated):
        template = rendered.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
        ours = [mount["mountPath"] for mount in template[side]["volumeMounts"]]
        every = [*ours, *mounted_by_spark(template, side)]
        assert sorted(every) == sorted(set(every))


@pytest.mark.parametrize("side", ["driver", "executor"])
def test_sparks_scratch_files_go_to_a_volume_with_a_bound(operated: Rendered, side: str) -> None:
    template = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
    bounds = {volume["name"]: volume.get("emptyDir", {}).get("sizeLimit") for volume in template["volumes"]}
    (scratch,) = (mount for mount in template[side]["volumeMounts"] if mount["name"].startswith(SCRATCH))
    assert bounds[scratch["name"]]
    # Java's temporary files, and the native code that it unpacks, need this place too: the root is read-only.
    assert scratch["mountPath"] == "/tmp"
    assert not scratch.get("readOnly")


def test_the_audit_and_the_runbook_say_the_same_of_a_balance_that_does_not_close() -> None:
    hour = "2026-11-01 01:00:00"
    with pytest.raises(CannotRun) as raised:
        Balance({hour: {"orders": {"accepted": 2, "delivered_once": 1}}}).close(hour)
    runbook = " ".join((HERE / "RUNBOOK.md").read_text().split())
    section = runbook.split("A balance that does not close is a fault of the audit. ")[1].split("## ")[0]
    for text in (str(raised.value), section):
        assert "keep the lake" in text
        assert "open an issue" in text
        assert "--lake" in text
        assert "a new folder" in text
        assert "--replace-findings" in text


def test_the_alert_for_a_late_audit_waits_for_two_turns(prod: Rendered) -> None:
    (rule,) = (
        rule
        for group in prod.one("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
        if rule["alert"] == "FencepostAuditLate"
    )
    (limit_s,) = (int(number) for number in re.findall(r"> (\d+)", rule["expr"]))
    assert limit_s >= 2 * 3600


# ------------------------------------------------------------------------------------------- one object and another


def selects(selector: Object, labels: Object) -> bool:
    """Check whether a label selector selects an object with these labels."""
    named = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    rules = selector.get("matchExpressions", ())
    assert all(rule["operator"] == "In" for rule in rules)
    return named and all(labels.get(rule["key"]) in rule["values"] for rule in rules)


def test_every_selector_selects_pods(rendered: Rendered) -> None:
    labels = [template["metadata"]["labels"] for _, template in rendered.pods()]
    selectors = [
        ("PodDisruptionBudget", "selector"),
        ("NetworkPolicy", "podSelector"),
    ]
    for kind, field in selectors:
        for name, found in rendered.of(kind).items():
            assert any(selects(found["spec"][field], each) for each in labels), f"{kind}/{name}"
    for name, service in rendered.of("Service").items():
        assert sum(selects({"matchLabels": service["spec"]["selector"]}, each) for each in labels) == 1, name


def test_pods_are_spread_among_their_like(pod: Object) -> None:
    keys = {each["topologyKey"] for each in pod["spec"]["topologySpreadConstraints"]}
    assert keys == {"topology.kubernetes.io/zone", "kubernetes.io/hostname"}
    for each in pod["spec"]["topologySpreadConstraints"]:
        assert selects(each["labelSelector"], pod["metadata"]["labels"])


def test_every_monitor_finds_a_port_of_a_service(prod: Rendered) -> None:
    for name, monitor in prod.of("ServiceMonitor").items():
        (service,) = (
            found
            for found in prod.of("Service").values()
            if selects(monitor["spec"]["selector"], found["metadata"]["labels"])
        )
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {each["port"] for each in monitor["spec"]["endpoints"]} <= ports, name


def test_each_object_that_a_pod_names_exists(rendered: Rendered) -> None:
    elsewhere = {("Secret", "fencepost-redis")}  # the comment in the prod overlay says how to create it
    known = {(found["kind"], found["metadata"]["name"]) for found in rendered.objects} | elsewhere
    for where, template in rendered.pods():
        wanted = {("ServiceAccount", template["spec"]["serviceAccountName"])}
        for volume in template["spec"].get("volumes", ()):
            if "configMap" in volume:
                wanted.add(("ConfigMap", volume["configMap"]["name"]))
            if "persistentVolumeClaim" in volume:
                wanted.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        for variable in container_of(template).get("env", ()):
            if "secretKeyRef" in variable.get("valueFrom", {}):
                wanted.add(("Secret", variable["valueFrom"]["secretKeyRef"]["name"]))
        assert wanted <= known, where


def test_every_image_has_a_tag_that_is_not_latest(rendered: Rendered, operated: Rendered) -> None:
    images = {container_of(template)["image"] for _, template in rendered.pods()}
    images.add(operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]["image"])
    for image in images:
        name, colon, tag = image.partition(":")
        assert name in {"fencepost-service", "fencepost-spark"}
        assert colon
        assert tag != "latest"
