"""Evaluates alerts with Prometheus' own engine (`promtool test rules`), over metrics scraped from real processes.

A phase is made of two scrapes: its values stay as they are, or go on changing as between the two, for as long as a test
says. So an alert that fires after minutes is tested with a fault of seconds. The engine's clock starts at 0; a metric
that is a time (`…_timestamp_seconds`) is shifted accordingly.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy import places
from tests.kubernetes.rendering import Rendered

STEP_S: Final = 15  # between two scrapes of the service, as in its monitor
AUDIT_STEP_S: Final = 60  # between two scrapes of the audit's metrics, as in their monitor
HEALTHY_S: Final = 1800
PACKAGE: Final = "prometheus"  # Debian's package of promtool

Series = tuple[str, tuple[tuple[str, str], ...]]


def promtool() -> Path:
    """Find promtool on PATH, or unpack Debian's package into the cache. Skips the test if neither is available."""
    if found := shutil.which("promtool"):
        return Path(found)
    kept = places.cache() / PACKAGE
    program = kept / "usr" / "bin" / "promtool"
    if not program.exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            pytest.skip(f"no promtool on PATH: please install Prometheus (on Debian: apt-get install {PACKAGE})")
        kept.mkdir(parents=True, exist_ok=True)
        got = _download(kept)
        if got is None:  # the first request, on a new machine
            _run(["apt-get", "update"], kept)
            got = _download(kept)
        if got is None:
            pytest.skip(f"no promtool on PATH, and apt-get does not get {PACKAGE}: please install it")
        unpacked = kept / "unpacking"
        done = _run(["dpkg-deb", "--extract", str(got), str(unpacked)], kept)
        assert done.returncode == 0, done.stderr
        program.parent.mkdir(parents=True, exist_ok=True)
        (unpacked / "usr" / "bin" / "promtool").replace(program)
        shutil.rmtree(unpacked)
        got.unlink()
    return program


def _download(folder: Path) -> Path | None:
    _run(["apt-get", "download", PACKAGE], folder)
    return next(folder.glob(f"{PACKAGE}_*.deb"), None)


def _run(command: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@dataclass(frozen=True)
class Scrape:
    """The samples of a scrape, and its time (seconds since 1970)."""

    at: float
    samples: Mapping[Series, float]

    def value(self, name: str, **labels: str) -> float | None:
        """Find the sample with this name and these labels."""
        wanted = set(labels.items())
        found = [value for (of, having), value in self.samples.items() if of == name and wanted <= set(having)]
        assert len(found) <= 1, f"{name}{labels}: which one?"
        return found[0] if found else None


def parse(text: str, at: float, target: Mapping[str, str]) -> Scrape:
    """Parse the samples of a text of metrics, with the labels that a scrape adds for its target."""
    samples: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name, tuple(sorted({**sample.labels, **target}.items()))] = sample.value
    return Scrape(at, samples)


def scrape(url: str, **target: str) -> Scrape:
    """Read the metrics at a URL."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    return parse(text, time.time(), target)


def together(*scrapes: Scrape) -> Scrape:
    """Join the scrapes of several targets."""
    samples: dict[Series, float] = {}
    for each in scrapes:
        samples |= each.samples
    return Scrape(max(each.at for each in scrapes), samples)


NOTHING: Final = Scrape(0.0, {})  # no target answers


class Rules:
    """The alerts of one group of the rendered manifests, for promtool."""

    def __init__(self, prod: Rendered, group: str, folder: Path) -> None:
        self.promtool = promtool()
        self.folder = folder
        groups = [each for each in prod.one("PrometheusRule")["spec"]["groups"] if each["name"] == group]
        assert len(groups) == 1
        self.file = folder / "rules.yaml"
        self.file.write_text(yaml.safe_dump({"groups": groups}))

    def check(self) -> str:
        """Run `promtool check rules`; AssertionError if it finds a fault."""
        return self._tool("check", "rules", str(self.file))

    def assert_firing(self, alerts: Iterable[str], healthy: Scrape, fault: Sequence[Scrape], hold_s: float) -> None:
        """Check that exactly these alerts fire after a fault of `hold_s`, and none before it nor at its start.

        `fault` is two scrapes of it: values that changed from one to the other go on changing like that.
        """
        steps, healthy_steps = int(hold_s / STEP_S) + 1, HEALTHY_S // STEP_S
        first, second = fault
        series = {*healthy.samples, *first.samples, *second.samples}
        firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
        samples = [{"labels": json_labels(alertname=name), "value": 1} for name in sorted(alerts)]
        self._test(
            [
                (
                    each,
                    f"{_held(healthy, each, healthy_steps, HEALTHY_S)} "
                    f"{_going_on(first, second, each, healthy_steps, steps)}",
                )
                for each in sorted(series)
            ],
            [
                {"expr": firing, "eval_time": f"{(healthy_steps - 1) * STEP_S}s", "exp_samples": []},
                {"expr": firing, "eval_time": f"{(healthy_steps + steps - 1) * STEP_S}s", "exp_samples": samples},
            ],
        )

    def assert_course(self, course: Sequence[tuple[Scrape, float, Iterable[str]]]) -> None:
        """Show each scrape of the audit's metrics for this many seconds, in turn, and check that exactly these alerts
        fire at its end.

        Alerts with a kind of finding are written `alert/kind`.
        """
        every = sorted({series for found, _, _ in course for series in found.samples})
        values: dict[Series, list[str]] = {series: [] for series in every}
        firing = 'group by (alertname, kind) (ALERTS{alertstate="firing"})'
        checks, done = [], 0
        for found, shown_s, alerts in course:
            steps = int(shown_s / AUDIT_STEP_S)
            for series in every:
                values[series].append(_held(found, series, steps, done * AUDIT_STEP_S))
            done += steps
            expected = [
                json_labels(**dict(zip(("alertname", "kind"), name.split("/"), strict=False))) for name in alerts
            ]
            samples = [{"labels": labels, "value": 1} for labels in sorted(expected)]
            checks.append({"expr": firing, "eval_time": f"{(done - 1) * AUDIT_STEP_S}s", "exp_samples": samples})
        self._test([(series, " ".join(values[series])) for series in every], checks, AUDIT_STEP_S)

    def _test(
        self, series: Iterable[tuple[Series, str]], expected: Sequence[Mapping[str, object]], step_s: int = STEP_S
    ) -> None:
        """Run `promtool test rules` over these series, in its notation, with a scrape each `step_s`."""
        document = {
            "rule_files": [self.file.name],
            "evaluation_interval": f"{step_s}s",
            "tests": [
                {
                    "interval": f"{step_s}s",
                    "input_series": [
                        {"series": f"{name}{json_labels(**dict(labels))}", "values": values}
                        for (name, labels), values in series
                    ],
                    "promql_expr_test": list(expected),
                }
            ],
        }
        path = self.folder / "tests.yaml"
        path.write_text(yaml.safe_dump(document))
        self._tool("test", "rules", str(path))

    def _tool(self, *arguments: str) -> str:
        environment = {**os.environ, "TZ": "UTC"}
        done = subprocess.run(
            [self.promtool, *arguments], capture_output=True, text=True, check=False, timeout=60, env=environment
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout


def check_metrics(text: str) -> str:
    """Return the complaints of Prometheus' linter about a text of metrics; "" for none."""
    done = subprocess.run(
        [promtool(), "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout + done.stderr


def json_labels(**labels: str) -> str:
    """Format labels for PromQL."""
    return "{" + ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items()) + "}"


def _moved(scrape: Scrape, series: Series, at_s: float) -> float | None:
    """Compute the value of a series at a time of the engine's clock."""
    value = scrape.samples.get(series)
    if value is not None and series[0].endswith("_timestamp_seconds"):
        return value - scrape.at + at_s
    return value


def _held(scrape: Scrape, series: Series, steps: int, at_s: float) -> str:
    value = _moved(scrape, series, at_s)
    return f"_x{steps}" if value is None else f"{_number(value)}x{steps - 1}"


def _going_on(first: Scrape, second: Scrape, series: Series, before: int, steps: int) -> str:
    start = _moved(first, series, before * STEP_S)
    if start is None or series not in second.samples:
        return f"_x{steps}"
    change = (second.samples[series] - first.samples[series]) / max(second.at - first.at, 1e-9) * STEP_S
    return f"{_number(start)}{'+' if change >= 0 else '-'}{_number(abs(change))}x{steps - 1}"


def _number(value: float) -> str:
    return f"{value:.6f}"
