"""Tests the workflows in .github: what they use is pinned, and what they run exists."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml

from deploy.places import ROOT
from tests import go_tools

WORKFLOWS: Final = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
NAMES: Final = [path.name for path in WORKFLOWS]


@pytest.fixture(params=WORKFLOWS, ids=NAMES)
def workflow(request: pytest.FixtureRequest) -> Any:
    return yaml.load(request.param.read_text(), yaml.BaseLoader)  # strings only: `on` is no boolean


def steps(workflow: Any) -> Iterator[Any]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_there_are_checks_and_a_release() -> None:
    assert NAMES == ["checks.yaml", "release.yaml"]


def test_an_action_is_pinned_to_a_version(workflow: Any) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+\.\d+\.\d+", each)] == []


def test_one_version_of_an_action_is_used() -> None:
    used = {found for path in WORKFLOWS for found in re.findall(r"uses: (\S+)@(\S+)", path.read_text())}
    assert len({name for name, _ in used}) == len(used)


def test_a_job_may_read_only_unless_it_says_otherwise_and_ends(workflow: Any) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert int(job["timeout-minutes"]) <= 120, name
        assert "runs-on" in job


def test_no_text_of_a_request_goes_into_a_script(workflow: Any) -> None:
    """A script gets values as variables: an expression within it would run what a branch or a title says."""
    assert [step["run"] for step in steps(workflow) if "${{" in step.get("run", "")] == []


def test_modules_and_files_that_a_step_runs_exist(workflow: Any) -> None:
    for step in steps(workflow):
        script = step.get("run", "")
        for module in re.findall(r"python -m (\S+)", script):
            if module != "pytest":
                assert ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file(), module
        for place in re.findall(r"(?<![\w$/.])(?:\./)?((?:tests|deploy|\.ci)/\S+)", script):
            assert (ROOT / place).exists(), place


def test_no_registry_is_named() -> None:
    """Where images go is a variable of the repository."""
    for path in WORKFLOWS:
        assert re.findall(r"(?:[a-z0-9-]+\.)+(?:io|com|org|dev)\b", path.read_text()) == [], path.name


def test_a_release_builds_all_images_for_both_architectures_with_sbom_and_signature() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yaml").read_text())
    job = release["jobs"]["images"]
    assert job["strategy"]["matrix"]["target"] == ["service", "spark", "spark-s3"]
    (build,) = (step["with"] for step in job["steps"] if step.get("uses", "").startswith("docker/build-push-action"))
    assert build["platforms"] == "linux/amd64,linux/arm64"
    assert (build["push"], build["sbom"], build["provenance"]) == (True, True, "mode=max")
    assert any("cosign sign" in step.get("run", "") for step in job["steps"])
    assert job["permissions"]["id-token"] == "write"


def test_actionlint_finds_nothing() -> None:
    program = go_tools.have("actionlint")
    done = subprocess.run(
        [program, "-shellcheck=", "-pyflakes=", *WORKFLOWS], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")
