"""Makes an invoice of each order, once, as a member of a consumer group.

    FENCEPOST_URL=http://127.0.0.1:8000 FENCEPOST_KAFKA=127.0.0.1:9092 \\
        python -m deploy.examples.process_orders orders invoices

Start it as often as there are partitions, kill it at any time, and start it again. process_orders/main.go does the same
in Go; both may be members of one group.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator

# In a program of your own: from fencepost import …
from service.fencepost import AsyncClient, Event, GroupReader, Record

VAT_PERCENT = 19


def invoice(record: Record, topic: str) -> Event:
    """Make the result of one order: {"order": 7, "cents": 1250}. It depends on the record alone."""
    order = json.loads(record.value)
    value = {"order": order["order"], "cents": order["cents"], "vat": order["cents"] * VAT_PERCENT // 100}
    return Event(topic, value, key=f"{order['order']}")


async def process(given: argparse.Namespace) -> None:
    async with (
        AsyncClient(os.environ["FENCEPOST_URL"]) as client,
        GroupReader(
            given.source,
            given.group,
            records_max=given.records_max,
            bootstrap_servers=os.environ["FENCEPOST_KAFKA"],
            session_timeout_ms=given.session_ms,
            heartbeat_interval_ms=given.session_ms // 5,
        ) as reader,
    ):
        async for batch in reader:
            written = await batch.send(client, [invoice(record, given.result) for record in batch.records])
            what = "dropped" if written is None else "replayed" if written.replayed else "written"
            print(f"{what} {len(batch.records)} of {batch.key}", flush=True)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """End the task by SIGTERM: it leaves the group, whose other members need not wait for the session's end."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        yield


async def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an invoice of each order, once.")
    parser.add_argument("source", help="topic of the orders")
    parser.add_argument("result", help="topic of the invoices")
    parser.add_argument("--group", default="billing", help="the consumer group")
    parser.add_argument("--records-max", type=int, default=500, help="the most orders of one transaction")
    parser.add_argument("--session-ms", type=int, default=10_000, help="a killed member's partitions move after it")
    with ended_by_sigterm():
        await process(parser.parse_args())


if __name__ == "__main__":
    asyncio.run(main())
