"""Writes one event with httpx, and repeats the request itself.

    FENCEPOST_URL=http://127.0.0.1:8000 python deploy/examples/send_httpx.py order-1 [TOPIC]

The client of `fencepost` does the same, and keeps events over a crash of its program.
"""

import os
import random
import sys
import time
from typing import Any

import httpx

GIVE_UP_S = 60.0
FIRST_PAUSE_S, PAUSE_MAX_S = 0.2, 5.0
# The event is not written, or may be: the next request with the same key tells. All other answers are final.
RETRIED = {408, 409, 429, 500, 502, 503, 504}


def send(client: httpx.Client, key: str, event: dict[str, Any]) -> httpx.Response:
    """Send an event until the answer is final. Raises TimeoutError after GIVE_UP_S: then it may be written."""
    give_up_at = time.monotonic() + GIVE_UP_S
    pause_s = FIRST_PAUSE_S
    while True:
        wait_s = pause_s * random.uniform(0.5, 1.0)
        try:
            answer = client.post("/events", json=event, headers={"Idempotency-Key": key})
        except httpx.TransportError as error:
            print(f"no answer: {error!r}", file=sys.stderr)
        else:
            if answer.status_code not in RETRIED:
                return answer
            print(answer.status_code, answer.text, file=sys.stderr)
            wait_s += float(answer.headers.get("Retry-After", 0))
        if time.monotonic() + wait_s > give_up_at:
            raise TimeoutError(f"{key}: no final answer in {GIVE_UP_S:.0f} s")
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


def main(key: str, topic: str = "demo") -> int:
    event: dict[str, Any] = {"topic": topic, "key": key, "value": {"order": key, "total": 12.5}}
    with httpx.Client(base_url=os.environ["FENCEPOST_URL"], timeout=15.0) as client:
        answer = send(client, key, event)
    print(answer.status_code, answer.text)
    return 0 if answer.status_code == httpx.codes.CREATED else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
