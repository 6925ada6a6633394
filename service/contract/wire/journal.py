"""Answers, and the records of the journal that hold them."""

import json
from collections.abc import Iterable

from service.contract.wire.versions import VERSION


def encode_answer(
    id: bytes,
    fp: bytes,
    at: int,
    status: int,
    code: str | None,
    replayed: bool,
    latency_ms: float,
    topic: str,
    partition: int | None,
    offset: int | None,
) -> str:
    """Encode an answer for the journal as JSON text; partition and offset are None unless the event is in Kafka.

    `at` is the event's accepted_at, if it has one, else the time of the answer, in ms.
    """
    where = f'"partition":{"null" if partition is None else partition},"offset":{"null" if offset is None else offset}'
    return (
        f'{{"id":"{id.hex()}","fp":"{fp.hex()}","at":{at},"status":{status},'
        f'"code":{"null" if code is None else json.dumps(code)},"replayed":{"true" if replayed else "false"},'
        f'"latency_ms":{latency_ms:.3f},"topic":"{topic}",{where}}}'
    )


def encode_answers(instance: str, answers: Iterable[str]) -> bytes:
    """Encode a record of the journal: the answers of one flush."""
    return f'{{"v":{VERSION},"instance":"{instance}","answers":[{",".join(answers)}]}}'.encode()
