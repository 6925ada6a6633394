"""A program that sends events: `python -m tests.integration.sender URL TOPIC FOLDER COUNT`, and may be killed.

It gives each number to the client once: the file `given` has how many, written before the call. Each request has a
connection of its own.
"""

import sys
from pathlib import Path

from service.fencepost.client import Client, Event

SIZES = (1, 4, 1, 7)  # of its calls, in turn


def main(url: str, topic: str, folder: Path, count: int) -> None:
    given = folder / "given"
    number = int(given.read_text()) if given.exists() else 0
    with Client(url, spool=folder / "spool", headers={"Connection": "close"}) as client:
        for result in client.resume():
            print("resumed", result, flush=True)  # noqa: T201
        for call in range(count):
            if number >= count:
                break
            numbers = range(number, min(count, number + SIZES[call % len(SIZES)]))
            number = numbers.stop
            (folder / "next").write_text(f"{number}")
            (folder / "next").replace(given)
            for result in client.send_many([Event(topic, n) for n in numbers]):
                print("sent", result, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
