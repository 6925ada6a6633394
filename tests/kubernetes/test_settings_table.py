"""The table of settings has them all, and the README's is that table."""

from dataclasses import fields

import pytest

from deploy.local.places import ROOT
from deploy.settings_table import BEGIN, END, put, standing, table
from service.contract import PREFIX
from service.core.settings import Settings


def test_every_setting_has_a_row() -> None:
    lines = table().splitlines()[2:]
    names = [line.split("`")[1] for line in lines]
    assert [name for name in names if not name.endswith("_FILE")] == [PREFIX + f.name.upper() for f in fields(Settings)]
    files = {name for name in names if name.endswith("_FILE")}
    assert files == {"FENCEPOST_KAFKA_SASL_PASSWORD_FILE", "FENCEPOST_REDIS_FILE"}
    assert all(line.count(" | ") == 3 for line in lines)
    assert "| `FENCEPOST_PORT` | `8000` | port to listen on | service |" in lines


def test_the_table_is_put_between_the_markers() -> None:
    text = f"a\n\n{BEGIN}\n{END}\n\nb\n"
    assert standing(text) == ""
    assert put(text) == f"a\n\n{BEGIN}\n{table()}{END}\n\nb\n"
    assert put(put(text)) == put(text)
    assert standing(put(text)) == table().strip()
    assert standing("a\n\nb\n") is None


def test_the_readmes_table_is_this_one() -> None:
    found = standing((ROOT / "README.md").read_text(encoding="utf-8"))
    if not found:
        pytest.skip(f"README.md has no table between {BEGIN} and {END} yet: python -m deploy.settings_table README.md")
    assert found == table().strip(), "the settings have changed: python -m deploy.settings_table README.md"
