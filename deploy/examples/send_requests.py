"""Writes one event with requests, whose urllib3 repeats the request.

FENCEPOST_URL=http://127.0.0.1:8000 python deploy/examples/send_requests.py order-1 [TOPIC]
"""

import os
import sys
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

# urllib3 repeats no POST by itself, because most servers would carry it out twice. With an idempotency key it may.
RETRY = Retry(
    total=8,
    allowed_methods=["POST"],
    status_forcelist=[408, 409, 429, 500, 502, 503, 504],  # all other answers are final
    respect_retry_after_header=True,
    backoff_factor=0.2,
    backoff_jitter=0.2,
    backoff_max=5.0,
    raise_on_status=False,
)


def main(key: str, topic: str = "demo") -> int:
    event: dict[str, Any] = {"topic": topic, "key": key, "value": {"order": key, "total": 12.5}}
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=RETRY))
        url = f"{os.environ['FENCEPOST_URL']}/events"
        answer = session.post(url, json=event, headers={"Idempotency-Key": key}, timeout=(5.0, 15.0))
    print(answer.status_code, answer.text)
    return 0 if answer.status_code == requests.codes.created else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
