"""Writes a file of JSON lines through the produce API v3 of the Confluent REST Proxy, in streamed requests, with httpx.

    FENCEPOST_URL=http://127.0.0.1:8000 python deploy/examples/produce_v3.py import-7 orders.ndjson [TOPIC]

Each part of the file is one request, whose key is made from the import's and the number of the part. A part whose
records are not all answered 200 is sent again, whole, with the same key: for what is written already, the service
answers as before. So the program may also be started again, for as long as keys are remembered.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

CLUSTER = "any"  # Fencepost takes any id; a REST Proxy lists its own at /v3/clusters
PART_RECORDS = 5_000  # httpx reads when it has sent all: the service holds 4 MiB of answers for such a client
GIVE_UP_S = 60.0
FIRST_PAUSE_S, PAUSE_MAX_S = 0.2, 5.0
# Statuses of answers, and codes of records: outcome unknown (40801), over the rate (42901), not written (50003). Others
# are final.
RETRIED = {408, 409, 429, 500, 502, 503, 504, 40801, 42901, 50003}


def records(lines: Sequence[str]) -> Iterator[bytes]:
    """Make the body of a request record by record, which httpx sends in chunks."""
    for line in lines:
        yield json.dumps({"value": {"type": "JSON", "data": json.loads(line)}}).encode()


def attempt(client: httpx.Client, path: str, key: str, lines: Sequence[str]) -> tuple[set[int], float]:
    """Send a part once; returns the codes of what is not written, and the seconds to wait before the next attempt."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    try:
        answer = client.post(path, content=records(lines), headers=headers)
    except httpx.TransportError as error:
        print(f"{key}: no answer: {error!r}", file=sys.stderr)
        return {httpx.codes.SERVICE_UNAVAILABLE}, 0.0
    if answer.status_code != httpx.codes.OK:
        print(f"{key}: {answer.status_code} {answer.text}", file=sys.stderr)
        return {answer.status_code}, float(answer.headers.get("Retry-After", 0))
    answers = [json.loads(line) for line in answer.text.splitlines()]
    errors = [each for each in answers if each["error_code"] != httpx.codes.OK]
    print(f"{key}: {len(answers) - len(errors)} written, not written: {errors[:1]}", file=sys.stderr)
    return {each["error_code"] for each in errors}, 0.0


def write(client: httpx.Client, path: str, key: str, lines: Sequence[str]) -> None:
    """Send a part until all its records are written. Raises RuntimeError if one is refused, or no time is left."""
    give_up_at = time.monotonic() + GIVE_UP_S
    pause_s = FIRST_PAUSE_S
    while True:
        codes, wait_s = attempt(client, path, key, lines)
        if not codes:
            return
        wait_s += pause_s * random.uniform(0.5, 1.0)
        if not codes <= RETRIED or time.monotonic() + wait_s > give_up_at:
            raise RuntimeError(f"{key}: not all records are written: {sorted(codes)}")
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def main(key: str, file: str, topic: str = "demo") -> None:
    path = f"/v3/clusters/{CLUSTER}/topics/{topic}/records"
    with httpx.Client(base_url=os.environ["FENCEPOST_URL"], timeout=15.0) as client, Path(file).open() as lines:
        for part in itertools.count():
            if not (of_part := list(itertools.islice(lines, PART_RECORDS))):
                break
            write(client, path, f"{key}/{part}", of_part)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RuntimeError as error:
        sys.exit(str(error))
