"""Tests the Helm chart: it makes the objects of the overlays, and refuses values that cannot work."""

import json
from pathlib import Path
from typing import Any, Final

import jsonschema
import pytest
import yaml

from deploy.places import ROOT
from service.contract.settings import MECHANISMS
from spark.cli.command_line import parse
from tests.kubernetes.charts import CHART, comparable, helm, template, try_template, values
from tests.kubernetes.rendering import HERE, Rendered, render_with
from tests.kubernetes.test_code import selects
from tests.kubernetes.test_restricted import breaches
from tests.kubernetes.test_schemas import VERSIONS, check

EXAMPLES: Final = ("dev", "prod", "full", "https")
# The components of the overlay `prod` that `full` has in addition.
COMPONENTS: Final = (
    "management-port",
    "kafka-sasl-tls",
    "redis-tls",
    "redis-sentinel",
    "schema-registry",
    "schema-registry-tls",
    "issuer",
    "tracing",
    "ingress",
    "gateway",
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return Rendered("full", render_with("prod", tmp_path_factory.mktemp("full"), *COMPONENTS))


def defaults() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def schema() -> Any:
    return json.loads((CHART / "values.schema.json").read_text())


# --------------------------------------------------------------------------------------------------- without Helm


def test_what_chart_and_manifests_share_is_a_link() -> None:
    links = {path.name: path.resolve().relative_to(HERE) for path in (CHART / "files").iterdir() if path.is_symlink()}
    assert {name: str(path) for name, path in links.items()} == {
        "alerts.yaml": "components/monitoring/rules.yaml",
        "dashboard.json": "components/monitoring/dashboard.json",
        "rules.toml": "base/rules.toml",
    }
    assert len(links) == len(list((CHART / "files").iterdir()))


def test_the_schema_has_each_value_and_the_values_each_name_of_the_schema() -> None:
    jsonschema.Draft7Validator.check_schema(schema())
    jsonschema.Draft7Validator(schema()).validate(defaults())
    assert names(schema()) == set(defaults()) | {"global"}

    def compare(part: Any, given: Any, where: str) -> None:
        for name, each in part.get("properties", {}).items():
            if name != "global" and "additionalProperties" in part and "requests" not in part["properties"]:
                assert name in given, f"{where}{name}"
                compare(each, given[name], f"{where}{name}.")

    compare(schema(), defaults(), "")


def names(part: Any) -> set[str]:
    return set(part["properties"])


def merged(under: Any, over: Any) -> Any:
    """Merge values as Helm does: maps by name, all else from `over`."""
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    return under | {name: merged(under.get(name), each) for name, each in over.items()}


def test_the_mechanisms_of_the_schema_are_those_of_the_settings() -> None:
    sasl = schema()["properties"]["kafka"]["properties"]["saslTls"]["properties"]
    assert set(sasl["mechanism"]["enum"]) <= set(MECHANISMS)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_fit_the_schema(example: str) -> None:
    given = yaml.safe_load(values(example).read_text())
    jsonschema.Draft7Validator(schema()).validate(merged(defaults(), given))


# ------------------------------------------------------------------------------------------------------ with Helm


@pytest.mark.parametrize("example", EXAMPLES)
def test_helm_lint_finds_nothing(example: str) -> None:
    done = helm("lint", "--strict", "--values", values(example), CHART)
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("rendered", ["dev", "prod"], indirect=True)
def test_the_chart_makes_the_objects_of_the_overlay(rendered: Rendered) -> None:
    assert comparable(template(values(rendered.name))) == comparable(rendered.objects)


def test_the_chart_makes_the_objects_of_the_components(full: Rendered) -> None:
    made, expected = comparable(template(values("full"))), comparable(full.objects)
    for each in (made, expected):  # the overlay's brokers have another port than the component's
        del each["ConfigMap/fencepost"]["data"]["FENCEPOST_KAFKA"]
    assert made == expected


def test_the_chart_makes_the_objects_of_the_component_for_https(https: Rendered) -> None:
    assert comparable(template(values("https"))) == comparable(https.objects)


def test_the_chart_makes_the_objects_of_the_component_for_an_audit_that_goes_on(
    followed: Rendered, tmp_path: Path
) -> None:
    file = tmp_path / "values.yaml"
    given = {"audit": {"follow": True}, "kafka": {"saslTls": {"enabled": True}}}
    file.write_text(yaml.safe_dump(given))
    objects = template(values("prod"), file)
    for found in objects:
        check(found, VERSIONS[-1])
    made, expected = comparable(objects), comparable(followed.objects)
    for each in (made, expected):
        # Brokers and their port are the overlay's, as in the test of all components.
        del each["ConfigMap/fencepost"]["data"]["FENCEPOST_KAFKA"], each["NetworkPolicy/fencepost-kafka"]
    assert made == expected


@pytest.mark.parametrize("example", ["full", "https"])
def test_every_object_fits_its_schema(example: str) -> None:
    """Also with the labels that the comparison leaves out."""
    for found in template(values(example)):
        check(found, VERSIONS[-1])


def test_every_pod_is_restricted() -> None:
    pods = list(Rendered("full", template(values("full"))).pods())
    assert pods
    assert {name: list(breaches(pod)) for name, pod in pods} == {name: [] for name, _ in pods}


def test_two_releases_in_one_namespace_share_nothing() -> None:
    first, second = (Rendered(name, template(values("full"), release=name)) for name in ("eu", "us"))
    ours = {(each["kind"], each["metadata"]["name"]) for each in first.objects}
    assert all(name.startswith("eu-fencepost") for _, name in ours)
    assert not ours & {(each["kind"], each["metadata"]["name"]) for each in second.objects}
    others = [pod["metadata"]["labels"] for _, pod in second.pods()]
    for kind, field in (
        ("NetworkPolicy", "podSelector"),
        ("PodDisruptionBudget", "selector"),
        ("Deployment", "selector"),
    ):
        for found in first.of(kind).values():
            assert not any(selects(found["spec"][field], each) for each in others), found["metadata"]["name"]
    for found in first.of("Service").values():
        assert not any(selects({"matchLabels": found["spec"]["selector"]}, each) for each in others)


def test_a_release_with_the_longest_name_has_valid_names() -> None:
    made = Rendered("long", template(values("full"), release="r" * 53))
    assert all(len(name) <= 52 for name in made.of("CronJob"))  # Kubernetes adds 11 characters for a job
    # A pod's name has 17 characters more than its Deployment's, and is FENCEPOST_INSTANCE.
    assert all(len(name) <= 63 - 17 for name in made.of("Deployment") if not name.endswith("-report"))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"autoscaling": {"maxReplicas": 13}}, "13 pods, and 4 more in an update, hold 68 slots: set settings."),
        ({"settings": {"FENCEPOST_SLOTS": "6"}}, "hold 90 slots: set settings.FENCEPOST_SLOTS_MAX to 90 or more"),
        (
            {"autoscaling": {"minReplicas": 13}},
            "autoscaling.maxReplicas is less than minReplicas: set it to 13 or more",
        ),
        ({"kafka": {"saslTls": {"enabled": True, "mechanism": "OAUTHBEARER"}}}, "set oauth.tokenUrl or oauth.tokenAud"),
        (
            {
                "kafka": {
                    "saslTls": {
                        "enabled": True,
                        "mechanism": "OAUTHBEARER",
                        "oauth": {"tokenUrl": "https://login/token"},
                    }
                }
            },
            "kafka.saslTls.oauth.tokenUrl needs oauth.clientId: set it",
        ),
        ({"redis": {"tls": True, "url": "redis://a:6379/0"}}, "redis.tls needs a redis.url that begins with rediss://"),
        (
            {"registry": {"enabled": True, "tls": {"enabled": True}}},
            "registry.tls needs a registry.url that begins with https://",
        ),
        ({"settings": {"FENCEPOST_REGISTRY_PASSWORD": "secret"}}, "FENCEPOST_REGISTRY_PASSWORD"),
        ({"redis": {"url": "redis+sentinel://a:26379/keys/0"}}, "redis.sentinel.enabled and a redis.url"),
        ({"redis": {"sentinel": {"enabled": True}, "url": "redis://a:6379/0"}}, "redis.sentinel.enabled and"),
        ({"redis": {"url": "redis+nodes://a:6379"}}, "redis/url"),
        ({"https": {"enabled": True}}, "https.enabled needs management.enabled"),
        (
            {"https": {"enabled": True}, "management": {"enabled": True}, "gateway": {"enabled": True}},
            "TLS ends there, or at ingress or gateway; enable one",
        ),
        ({"monitoring": {"enabled": True}, "audit": {"enabled": False}}, "monitoring.enabled needs audit.enabled"),
        ({"setings": {}}, "setings"),
        ({"settings": {"FENCEPOST_REDIS": "redis://:secret@a:6379/0"}}, "FENCEPOST_REDIS"),
        ({"settings": {"FENCEPOST_KEY_TTL_S": 604800}}, "FENCEPOST_KEY_TTL_S"),
        ({"audit": {"schedule": "17 3 * * *"}}, "schedule"),
        ({"audit": {"maxRecords": 0}}, "maxRecords"),
    ],
)
def test_values_that_cannot_work_are_refused(given: Any, error: str, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(given))
    done = try_template(CHART, file)
    assert done.returncode != 0
    assert error in done.stderr


def test_the_audit_gets_its_silences_and_further_options(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    silences = '[[silences]]\nfinding = "unkeyed::orders:*"\nuntil = 2026-12-24\nreason = "a mirror"\n'
    audit = {"silences": silences, "extraArgs": ["--fail-on=error"], "secret": "sinks"}
    file.write_text(yaml.safe_dump({"audit": audit}))
    made = Rendered("audit", template(file))
    assert made.one("ConfigMap", "fencepost-rules")["data"]["silences.toml"] == silences
    pod = made.one("CronJob", "fencepost-audit")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    assert arguments[-2:] == ["--silences=/etc/fencepost/silences.toml", "--fail-on=error"]
    parsed = parse([argument for argument in arguments if argument.startswith("--")])
    assert parsed.fail_on == ("error",)
    (mounted,) = (one["mountPath"] for one in pod["containers"][0]["volumeMounts"] if one["name"] == "rules")
    assert parsed.silences == f"{mounted}/silences.toml"
    (secret,) = (one["secret"] for one in pod["volumes"] if one["name"] == "secret")
    assert secret == {"secretName": "sinks", "optional": True}


def test_a_change_replaces_the_pods_that_read_it_only_at_their_start(tmp_path: Path) -> None:
    """Settings: the service and an audit that goes on; the URL of Redis: the service; rules: none."""
    given: dict[str, Any] = {
        "audit": {"follow": True},
        "podAnnotations": {"team": "events"},
        "redis": {"url": "redis://a:6379/0"},
    }

    def made(**more: Any) -> dict[str, Any]:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(given | more))
        pods = dict(Rendered("made", tuple(yaml.safe_load_all(try_template(CHART, file).stdout))).pods())
        assert all(pod["metadata"]["annotations"]["team"] == "events" for pod in pods.values())
        return pods

    before = made()

    def replaced(**more: Any) -> set[str]:
        return {name for name, pod in made(**more).items() if pod != before[name]}

    service, audit = "Deployment/fencepost", "Deployment/fencepost-audit"
    assert replaced(settings={"FENCEPOST_KAFKA": "elsewhere:9092"}) == {service, audit}
    assert replaced(redis={"url": "redis://b:6379/0"}) == {service}
    assert replaced(rules="# other\n") == set()


def test_the_pods_log_in_by_tokens_of_an_endpoint_or_of_their_own_account(tmp_path: Path) -> None:
    def made(**oauth: object) -> Rendered:
        file = tmp_path / f"{'-'.join(oauth)}.yaml"
        sasl = {"enabled": True, "mechanism": "OAUTHBEARER", "oauth": oauth}
        file.write_text(yaml.safe_dump({"kafka": {"saslTls": sasl}}))
        objects = template(file)
        for found in objects:
            check(found, VERSIONS[-1])
        return Rendered("oauth", objects)

    endpoint = made(tokenUrl="https://login.example/token", clientId="me", scope="kafka")
    settings = endpoint.one("ConfigMap", "fencepost")["data"]
    assert {name: settings[name] for name in settings if "_OAUTH_" in name or "_SASL_" in name} == {
        "FENCEPOST_KAFKA_SASL_MECHANISM": "OAUTHBEARER",
        "FENCEPOST_KAFKA_OAUTH_TOKEN_URL": "https://login.example/token",
        "FENCEPOST_KAFKA_OAUTH_CLIENT_ID": "me",
        "FENCEPOST_KAFKA_OAUTH_CLIENT_SECRET_FILE": "/etc/fencepost-kafka/client-secret",
        "FENCEPOST_KAFKA_OAUTH_SCOPE": "kafka",
    }
    assert endpoint.one("NetworkPolicy", "fencepost-tokens")["spec"]["egress"] == [
        {"ports": [{"protocol": "TCP", "port": 443}]}
    ]
    account = made(tokenAudience="kafka")
    settings = account.one("ConfigMap", "fencepost")["data"]
    assert settings["FENCEPOST_KAFKA_OAUTH_TOKEN_FILE"] == "/etc/fencepost-kafka/token"
    assert "fencepost-tokens" not in account.of("NetworkPolicy")
    for name, pod in account.pods():
        volumes = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "kafka"]
        token = {"audience": "kafka", "expirationSeconds": 3600, "path": "token"}
        wanted = {"sources": [{"secret": {"name": "fencepost-kafka"}}, {"serviceAccountToken": token}]}
        assert [volume["projected"] for volume in volumes] == [wanted], name


def test_rules_and_schemas_of_the_values_are_mounted_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"rules": "# none\n", "schemas": {"order.json": "{}"}}))
    made = Rendered("rules", template(file))
    assert made.one("ConfigMap", "fencepost-rules")["data"] == {"rules.toml": "# none\n", "order.json": "{}"}


def test_a_package_has_the_linked_files(tmp_path: Path) -> None:
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.glob("fencepost-*.tgz")
    done = try_template(packed, values("prod"))
    assert done.returncode == 0, done.stderr
    assert "FencepostNoReadySlot" in done.stdout
    assert (ROOT / "deploy" / "kubernetes" / "base" / "rules.toml").read_text().splitlines()[0] in done.stdout
