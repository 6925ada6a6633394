"""Checks Dockerfile and compose file by reading them, without any tool."""

import re
from dataclasses import fields
from fnmatch import fnmatch
from typing import Any, Final

import pytest
import yaml
from compose_spec import PyOptions

from deploy.places import ROOT
from service.contract import PREFIX, Rules
from service.core.settings import Settings
from spark.cli.command_line import parse
from tests.kubernetes.rendering import HERE
from tests.kubernetes.times import way_out_s

COMPOSE: Final = (ROOT / "deploy" / "compose.yaml").read_text()
DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS: Final = [
    " ".join(line.split())
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
    if line.strip()
]
# A name with a dot before the first slash has a registry's host.
HOST: Final = re.compile(r"(?<![\w.-])(?!127\.)[a-z0-9-]+(?:\.[a-z0-9-]+)+(?::\d+)?/[a-z0-9]")


def stage(name: str) -> list[str]:
    """List the instructions of one stage."""
    starts = [index for index, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")]
    for start, end in zip(starts, [*starts[1:], len(INSTRUCTIONS)], strict=True):
        if INSTRUCTIONS[start].endswith(f" AS {name}"):
            return INSTRUCTIONS[start:end]
    raise AssertionError(f"no stage {name}")


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load(COMPOSE)


# ----------------------------------------------------------------------------------------------------- Dockerfile


def test_every_stage_is_made_of_the_base_or_another_stage() -> None:
    froms = [line.split() for line in INSTRUCTIONS if line.startswith("FROM ")]
    stages = [words[3] for words in froms]
    for index, (_, source, _, _) in enumerate(froms):
        assert source == "${BASE}" or source in stages[:index]
    assert stages[-1] == "service"  # the target without --target


def test_no_registry_and_no_index_is_named() -> None:
    for path in (ROOT / "Dockerfile", ROOT / "deploy" / "compose.yaml"):
        assert HOST.findall(path.read_text()) == [], path
    assert HOST.search("FROM ghcr.example.io/fencepost/service:1")
    assert HOST.search("pip install --index-url https://index.example.org/simple x")


@pytest.mark.parametrize("name", ["service", "spark"])
def test_images_run_as_the_user_of_the_manifests(name: str) -> None:
    assert "USER 10001:10001" in stage(name)
    for manifest in ("service.yaml", "audit.yaml"):
        text = (HERE / "base" / manifest).read_text()
        assert set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", text)) == {"10001"}


def test_packages_come_by_lock_and_checksum() -> None:
    for line in INSTRUCTIONS:
        if "pip install" in line:
            assert "--require-hashes" in line
        for sync in re.findall(r"uv sync [^&|]*", line):
            assert "--frozen" in sync
    assert "jars.ensure" in "".join(stage("jars"))  # it checks every jar against the lock


def test_the_image_for_s3_is_the_audits_with_further_jars() -> None:
    assert "deploy.install.s3" in "".join(stage("s3-jars"))  # it checks every jar against the lock
    assert stage("spark-s3") == [
        "FROM spark AS spark-s3",
        "COPY --from=s3-jars /build/cache/jars/spark /opt/jars",
        "ENV SPARK_CONF_DIR=/etc/fencepost-audit",
    ]


def test_the_image_for_s3_has_its_settings_from_the_audits_secret() -> None:
    (folder,) = (line.split("=")[1] for line in stage("spark-s3") if line.startswith("ENV "))
    pod = yaml.safe_load_all((HERE / "base" / "audit.yaml").read_text())
    (job,) = (found for found in pod if found["kind"] == "CronJob")
    spec = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (volume,) = (mount["name"] for mount in spec["containers"][0]["volumeMounts"] if mount["mountPath"] == folder)
    assert [each["name"] for each in spec["volumes"] if "secret" in each] == [volume]


def test_the_port_is_the_settings() -> None:
    assert f"EXPOSE {Settings().port}" in stage("service")


def test_each_copied_path_exists_and_is_in_the_build_context() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines  # all other files stay
    for line in INSTRUCTIONS:
        if line.startswith("COPY ") and "--from=" not in line:
            for source in [word for word in line.split()[1:-1] if not word.startswith("--")]:
                assert (ROOT / source).exists(), line
                assert any(
                    fnmatch(source, each) or each.startswith(f"{source}/") or source.startswith(f"{each}/")
                    for each in sent
                )


def test_the_audit_gets_of_the_service_what_it_imports() -> None:
    copied = {word for line in stage("spark-packages") for word in line.split() if word.startswith("service/")}
    assert copied == {"service/", *(f"service/{name}" for name in imported())} - {"service/"} | {"service/__init__.py"}


def imported() -> set[str]:
    """List the modules and packages of the service that the job imports, directly or indirectly."""
    found: set[str] = set()
    todo = list((ROOT / "spark").rglob("*.py"))
    while todo:
        for name in re.findall(r"^(?:from|import) service\.(\w+)", todo.pop().read_text(), re.MULTILINE):
            package = ROOT / "service" / name
            copied = name if package.is_dir() else f"{name}.py"
            if copied not in found:
                found.add(copied)
                todo += list(package.glob("*.py")) or [package.with_suffix(".py")]
    return found


# -------------------------------------------------------------------------------------------------------- compose


def test_the_compose_files_variables_are_settings(compose: Any) -> None:
    names = {PREFIX + item.name.upper() for item in fields(Settings)}
    for name in ("service", "audit"):
        environment = compose["services"][name]["environment"]
        assert set(environment) <= names
    environment = {name: str(value) for name, value in compose["services"]["service"]["environment"].items()}
    rules = HERE / "base" / "rules.toml"
    mounts = [mount for mount in compose["services"]["service"]["volumes"] if mount.startswith("./kubernetes")]
    assert mounts == [f"./kubernetes/base/rules.toml:{environment['FENCEPOST_RULES']}:ro"]
    settings = Settings.from_env(environment | {"FENCEPOST_RULES": str(rules)})
    Rules.read(settings.rules)
    assert settings.host == "0.0.0.0"
    assert compose["services"]["service"]["ports"] == [f"127.0.0.1:8000:{settings.port}"]


def test_the_compose_file_keeps_to_its_specification() -> None:
    PyOptions(apply_merge=True).from_yaml(COMPOSE)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("depends_on:", "depend_on:"),
        ("condition: service_healthy", "condition: healthy"),
        ("retries: 12", "retry: 12"),
        ("read_only: true", "read_only: maybe"),
        ("stop_grace_period: 90s", "stop_grace_period: soon"),
    ],
)
def test_a_broken_compose_file_is_refused(right: str, wrong: str) -> None:
    assert right in COMPOSE
    with pytest.raises(ValueError, match=r"."):
        PyOptions(apply_merge=True).from_yaml(COMPOSE.replace(right, wrong))


def test_compose_waits_for_longer_than_the_drain(compose: Any) -> None:
    assert int(compose["services"]["service"]["stop_grace_period"].removesuffix("s")) > way_out_s(Settings())


def test_our_containers_are_confined_and_the_others_official(compose: Any) -> None:
    for name, service in compose["services"].items():
        if "build" in service:
            assert service["read_only"] is True, name
            assert service["cap_drop"] == ["ALL"]
            assert service["build"]["target"] in ("service", "spark")
        else:
            image, _, tag = service["image"].partition(":")
            assert image in ("apache/kafka", "redis")
            assert tag[0].isdigit()


def test_every_port_is_of_this_machine_alone(compose: Any) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_composes_audit_is_a_command_that_it_takes(compose: Any) -> None:
    command = compose["services"]["audit"]["command"]
    assert command[:3] == ["python", "-m", "spark"]
    assert parse(command[3:]).lake.startswith(compose["services"]["audit"]["volumes"][-1].split(":")[1])


def test_composes_kafka_is_the_local_stacks(compose: Any) -> None:
    (version,) = set(
        re.findall(r"org\.apache\.kafka:kafka_2\.13:(\S+)", (ROOT / "deploy/install/kafka.lock").read_text())
    )
    assert {service["image"] for name, service in compose["services"].items() if name in ("kafka", "topic")} == {
        f"apache/kafka:{version}"
    }
