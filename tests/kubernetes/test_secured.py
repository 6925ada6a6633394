"""Tests the components for TLS: the code reads their settings, and secrets are in no ConfigMap and no variable."""

from pathlib import Path
from typing import Any, Final

import pytest

from service.contract import Rules, SharedSettings
from service.core.settings import Settings
from tests.kubernetes.rendering import HERE, Object, Rendered, container_of
from tests.kubernetes.test_restricted import breaches
from tests.kubernetes.test_schemas import VERSIONS, check
from tests.secured import Authority

REDIS_URL: Final = "rediss://:secret@redis.example:6379/0"
KAFKA_FILES: Final = {"FENCEPOST_KAFKA_SASL_PASSWORD_FILE": "password", "FENCEPOST_KAFKA_SSL_CAFILE": "ca.crt"}
REDIS_FILES: Final = {"FENCEPOST_REDIS_CAFILE": "ca.crt"}


def pods(rendered: Rendered) -> dict[str, Any]:
    return dict(rendered.pods())


def secret_of(mounts: list[Object], volumes: list[Object], path: str) -> tuple[str, str]:
    """Find the secret and its key that is mounted at a path of a container."""
    found = [mount for mount in mounts if Path(path).parent == Path(mount["mountPath"])]
    (mount,) = found
    assert mount["readOnly"] is True
    (volume,) = (volume for volume in volumes if volume["name"] == mount["name"])
    keys = [item["key"] for item in volume["secret"].get("items", ()) if item["path"] == Path(path).name]
    return volume["secret"]["secretName"], keys[0] if keys else Path(path).name


def test_files_are_mounted_from_secrets_where_the_settings_say(secured: Rendered) -> None:
    for name, files in {
        "Deployment/fencepost": KAFKA_FILES | REDIS_FILES,
        "CronJob/fencepost-audit": KAFKA_FILES,
    }.items():
        spec = pods(secured)[name]["spec"]
        (container,) = spec["containers"]
        settings = secured.settings(container)
        for variable, key in files.items():
            secret = "fencepost-redis" if variable in REDIS_FILES else "fencepost-kafka"
            named, at = secret_of(container["volumeMounts"], spec["volumes"], settings[variable])
            assert (named.startswith(secret), at) == (True, key)  # a generated secret has a suffix


def test_with_the_spark_operator_the_driver_has_the_files(secured_operated: Rendered) -> None:
    template = secured_operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
    (source,) = template["driver"]["envFrom"]
    settings = secured_operated.of("ConfigMap")[source["configMapRef"]["name"]]["data"]
    for variable, key in KAFKA_FILES.items():
        found = secret_of(template["driver"]["volumeMounts"], template["volumes"], settings[variable])
        assert found == ("fencepost-kafka", key)
    assert "kafka" not in [mount["name"] for mount in template["executor"]["volumeMounts"]]


def test_the_audit_has_the_passwords_of_its_sinks_and_the_service_has_not(
    prod: Rendered, followed: Rendered, operated: Rendered
) -> None:
    path = "/etc/fencepost-audit/warehouse.password"
    sink = """[[sinks]]
name = "warehouse"
topics = ["orders"]
format = "jdbc"
url = "jdbc:postgresql://db/warehouse"
table = "orders"
id = "event_id"
event_time = "accepted_at"
late_s = 900
"""
    of_service = container_of(pods(prod)["Deployment/fencepost"])
    rules = Rules.parse(f'{sink}password_file = "{path}"', prod.settings(of_service)["FENCEPOST_RULES"])
    assert rules.sinks[0].password_file == path
    application = operated.one("ScheduledSparkApplication", "fencepost-audit")["spec"]["template"]
    cron, follow = pods(prod)["CronJob/fencepost-audit"]["spec"], pods(followed)["Deployment/fencepost-audit"]["spec"]
    of_audit = {
        "cron": (cron["containers"][0], cron),
        "follow": (follow["containers"][0], follow),
        "operator": (application["driver"], application),
    }
    for name, (container, spec) in of_audit.items():
        found = secret_of(container["volumeMounts"], spec["volumes"], path)
        assert found == ("fencepost-audit", "warehouse.password"), name
        # Most audits have no secret.
        assert [one["secret"]["optional"] for one in spec["volumes"] if one["name"] == "secret"] == [True], name
    others = [of_service["volumeMounts"], application["executor"]["volumeMounts"]]
    assert not [mount for mounts in others for mount in mounts if path.startswith(f"{mount['mountPath']}/")]


def test_the_settings_are_right_together(secured: Rendered, authority: Authority, tmp_path: Path) -> None:
    """As the pods read them, with local files instead of the mounted ones."""
    container = container_of(pods(secured)["Deployment/fencepost"])
    environ = secured.settings(container)
    password = tmp_path / "password"
    password.write_text("a password")
    environ |= {"FENCEPOST_KAFKA_SASL_PASSWORD_FILE": str(password), "FENCEPOST_RULES": ""}
    environ |= dict.fromkeys(("FENCEPOST_KAFKA_SSL_CAFILE", "FENCEPOST_REDIS_CAFILE"), str(authority.cafile))
    settings = Settings.from_env({**environ, "FENCEPOST_REDIS": REDIS_URL, "FENCEPOST_INSTANCE": "pod"})
    assert settings.kafka_sasl
    assert settings.kafka_tls
    assert settings.kafka_ssl_check_hostname
    assert SharedSettings.from_env(environ).kafka_sasl_password == "a password"


def test_every_variable_is_a_setting_and_no_secret_is_in_a_map(secured: Rendered) -> None:
    for name, found in secured.of("ConfigMap").items():
        if name.startswith("fencepost-") and "FENCEPOST_KAFKA" in found["data"]:
            assert set(found["data"]) <= set(Settings.variables())
            assert not set(found["data"]) & {"FENCEPOST_KAFKA_SASL_PASSWORD", "FENCEPOST_REDIS"}


def test_the_network_policy_is_open_for_the_ports_of_tls(secured_operated: Rendered) -> None:
    policy = secured_operated.one("NetworkPolicy", "fencepost-kafka")["spec"]
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [9093]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(secured: Rendered, secured_operated: Rendered, version: str) -> None:
    for found in (*secured.objects, *secured_operated.objects):
        check(found, version)


def test_every_pod_is_restricted(secured: Rendered) -> None:
    assert {name: list(breaches(pod)) for name, pod in secured.pods()} == {name: [] for name, _ in secured.pods()}


def test_the_overlay_names_the_components() -> None:
    text = (HERE / "overlays" / "prod" / "kustomization.yaml").read_text()
    for name in ("spark-operator", "kafka-sasl-tls", "redis-tls", "redis-sentinel"):
        assert f"# - ../../components/{name} " in text
