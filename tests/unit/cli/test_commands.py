"""Tests how a command ends where Kafka or Redis holds what it cannot read."""

import pytest
import typer

from service.cli import commands
from service.contract.wire.versions import NewerVersion


def test_data_of_a_later_version_end_a_command_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """What it would print without them would be wrong."""

    async def look() -> None:
        raise NewerVersion("a ledger record of version 3")

    with pytest.raises(typer.Exit) as ended:
        commands.run(look())
    assert ended.value.exit_code == commands.CANNOT
    assert capsys.readouterr().err == "a ledger record of version 3\n"
