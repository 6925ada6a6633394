"""Tests the documents: links, limits, and generated parts."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from deploy import kinds_table, markers, settings_table, state_diagrams
from deploy.places import ROOT
from service.__main__ import IDLE_S
from service.claims.states import SLOT, SlotState
from service.cli.doctor import MEASUREMENTS
from service.contract import PREFIX
from service.contract.wire.names import TOPIC_CHARS_MAX
from service.core.problems import Problem
from service.core.settings import EVENT_BYTES_MAX, GROUP_EVENT_BYTES_MAX, Settings
from service.events import event
from service.events.cloudevents import MEMBERS_MAX
from service.events.strict_json import DEPTH_MAX
from service.http import batch, encodings, limits, produce_v3, request, request_reader, streamed_body
from service.http.request import OWN_BYTES
from service.http.streamed_response import UNREAD_BYTES_MAX
from service.kafka import topics
from spark.rules.kinds import SEVERITIES
from tests.faults import matrix

DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for folder in ("", "service", "spark", "deploy", "deploy/examples", "deploy/kubernetes", "tests", "tests/model")
    for path in (ROOT / folder).glob("*.md")
)


def anchors(text: str) -> set[str]:
    """List the anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        name, _, anchor = target.partition("#")
        place = (ROOT / document).parent / name if name else ROOT / document
        assert place.exists(), f"{document}: {target}"
        if anchor:
            assert anchor in anchors(place.read_text(encoding="utf-8")), f"{document}: {target}"


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180


def test_every_setting_has_a_row() -> None:
    lines = settings_table.table().splitlines()[2:]
    names = [line.split("`")[1] for line in lines]
    secrets = (
        *("KAFKA_OAUTH_CLIENT_SECRET", "KAFKA_SASL_PASSWORD"),
        *("REDIS", "REDIS_SENTINEL_PASSWORD", "REGISTRY_PASSWORD", "REGISTRY_TOKEN"),
    )
    files = {f"FENCEPOST_{name}_FILE" for name in secrets}
    assert files <= set(names)
    settings = [PREFIX + field.name.upper() for field in fields(Settings) if field.metadata]
    assert [name for name in names if name not in files] == settings
    assert all(line.count(" | ") == 3 for line in lines)
    assert "| `FENCEPOST_PORT` | `8000` | port to listen on | service |" in lines


def test_the_table_of_settings_is_the_one_that_the_class_makes() -> None:
    text = (ROOT / "service" / "README.md").read_text(encoding="utf-8")
    found = markers.current(text, settings_table.NAME)
    assert found == settings_table.table().strip(), (
        "the settings have changed: python -m deploy.settings_table service/README.md"
    )


def test_the_table_of_kinds_is_that_of_the_registry() -> None:
    text = (ROOT / "spark" / "README.md").read_text(encoding="utf-8")
    assert markers.current(text, kinds_table.NAME) == kinds_table.table().strip(), (
        "the kinds of findings have changed: python -m deploy.kinds_table spark/README.md"
    )
    for severity, meaning in SEVERITIES.items():
        assert f"`{severity}` ({meaning})" in " ".join(text.split()), severity


def test_the_diagrams_are_those_of_the_tables() -> None:
    text = (ROOT / "service" / "PROTOCOL.md").read_text(encoding="utf-8")
    for name, made in state_diagrams.DIAGRAMS.items():
        assert markers.current(text, name) == made.strip(), "python -m deploy.state_diagrams service/PROTOCOL.md"


def test_a_diagram_has_a_line_for_each_move() -> None:
    made = state_diagrams.diagram(SlotState.VACANT, SLOT)
    assert "  doubt --> leased: recover\n" in made
    assert made.count(" --> ") == len(SLOT) + 1


def test_generated_text_is_put_between_its_markers() -> None:
    text = "a\n\n<!-- x -->\n<!-- /x -->\n\nb\n"
    assert markers.current(text, "x") == ""
    assert markers.put(text, "x", "made\n") == "a\n\n<!-- x -->\nmade\n<!-- /x -->\n\nb\n"
    assert markers.put(markers.put(text, "x", "made\n"), "x", "made\n") == markers.put(text, "x", "made\n")
    assert markers.current("a\n\nb\n", "x") is None


def test_each_row_of_the_failure_table_names_existing_tests() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    section = text.split("\n## When things fail\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    rows = matrix.load_rows()
    assert len(lines) > 20
    for line in lines:
        names = re.findall(r"`([^`]+)`", line.rsplit(" | ", 1)[1])
        assert names, line
        for name in names:
            exists = (ROOT / "tests" / "integration" / name).is_file() if name.endswith(".py") else name in rows
            assert exists, f"{name}: {line}"


def test_the_readme_counts_the_records_that_the_doctor_writes() -> None:
    text = (ROOT / "service" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"(\w+) journal records?", text) == [{3: "three"}[MEASUREMENTS]] * 2


def test_the_limits_in_the_readme_are_those_of_the_code() -> None:
    section = (ROOT / "service" / "README.md").read_text().split("\n## Limits\n")[1].split("\n## ")[0]
    for said in (
        f"| {IDLE_S} s |",
        f"| {request.UNREAD_MAX_S:.0f} s |",
        f"| the time to read an answer of more than {request.WRITE_BYTES // 1024} KiB | "
        f"{request.reading_time_s(0):.0f} s more than it takes at {request_reader.LEAST_BYTES_S:,} bytes a second |",
        f"| {request_reader.HEAD_BYTES_MAX // 1024} KiB, {request_reader.HEAD_LINES_MAX} lines |",
        f"| {request_reader.SILENCE_MAX_S:.0f} s of silence; "
        f"{request_reader.SILENCE_MAX_S:.0f} s more than it takes at {request_reader.LEAST_BYTES_S:,} bytes a second |",
        f"of fewer than {4 * limits.FILES_KEPT:,} all but {limits.FILES_KEPT}",
        f"| {Settings().body_bytes_max // 2**20} MiB (`FENCEPOST_BODY_BYTES_MAX`); of NDJSON and v3 streams any length",
        f"| the ratio of a compressed body | {encodings.RATIO_MAX}, beyond {encodings.RATIO_FREE_BYTES // 2**20} MiB |",
        f"beside {OWN_BYTES // 1024} KiB for each connection (a stream: {2 * OWN_BYTES // 1024} KiB)",
        f"| {streamed_body.WINDOW_BYTES // 2**20} MiB and the incomplete line; {UNREAD_BYTES_MAX // 2**20} MiB |",
        f"| {DEPTH_MAX} |",
        f"| {TOPIC_CHARS_MAX} characters |",
        f"| the cluster's id in a path of the produce API | {produce_v3.CLUSTER_CHARS_MAX} characters | 404 |",
        f"| {EVENT_BYTES_MAX:,} bytes; its JSON {event.EVENT_TEXT_BYTES_MAX:,} |",
        f"| {topics.NEW_AT_ONCE} at a time; {topics.NEW_WAITING_MAX:,} that wait |",
        f"| the body of a webhook's delivery | {EVENT_BYTES_MAX:,} bytes |",
        f"| {event.HEADERS_MAX}; of a structured CloudEvent {MEMBERS_MAX - 1} attributes",
        f"| {event.BATCH_EVENTS_MAX:,}; of NDJSON and v3 streams any number |",
        f"| {batch.ATOMIC_EVENTS_MAX:,}, fewer with long topics; {GROUP_EVENT_BYTES_MAX // 2**20} MiB;",
    ):
        assert said in section, said
    event.check_key("k" * 255, "key")
    with pytest.raises(Problem):
        event.check_key("k" * 256, "key")
