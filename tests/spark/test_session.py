"""The session that the job opens."""

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from spark import jvm


def test_a_function_is_looked_up_once(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    F.ltrim("a")
    asked: list[str] = []
    client = jvm.gateway(spark)._gateway_client
    send = client.send_command

    def counted(command: str, *given: object, **named: object) -> object:
        asked.append(command)
        return send(command, *given, **named)

    monkeypatch.setattr(client, "send_command", counted)
    F.ltrim("a")
    calls = [command for command in asked if command.startswith("c\n")]
    looked_up = [command for command in asked if command.startswith("r\n")]  # reflection: "is there such a name?"
    assert calls
    assert not looked_up
