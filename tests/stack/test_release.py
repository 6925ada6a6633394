"""Tests that a release's versions agree, and that the changelog has its part."""

from pathlib import Path

import pytest

from deploy import release
from deploy.console import StackError


def test_every_file_names_the_version_of_the_project() -> None:
    assert len(release.versions()) >= 2
    assert set(release.versions().values()) == {release.version()}


def test_the_changelog_begins_with_what_is_not_released() -> None:
    text = release.CHANGELOG.read_text(encoding="utf-8")
    titles = list(release.sections(text))
    assert titles[:2] == [release.UNRELEASED, release.version()]
    assert text.count("\n## ") == len(titles)
    assert all(release.sections(text).values())


def test_the_notes_of_a_release_are_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"# Changes\n\n## Unreleased\n\n- b\n\n## {release.version()}\n\n### Added\n\n- a\n")
    monkeypatch.setattr(release, "CHANGELOG", changelog)
    assert release.notes(f"v{release.version()}") == "### Added\n\n- a"


def test_a_version_that_differs_is_named_with_its_file() -> None:
    with pytest.raises(StackError) as raised:
        release.notes("99.0.0")
    lines = str(raised.value).splitlines()
    assert lines[0] == "the tag 99.0.0 does not begin with v"
    assert lines[1] == f"pyproject.toml has version {release.version()}: set 99.0.0"
    assert any(
        line.startswith("deploy/kubernetes/overlays/prod/kustomization.yaml fencepost-service") for line in lines
    )
    assert lines[-1] == "deploy/CHANGELOG.md has no section 99.0.0: name Unreleased so"
