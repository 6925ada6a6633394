"""`python -m tests.managed`: load on two services whose connections must log in again every 10 s, for two minutes.

    python -m tests.managed --seconds 600 --reauth-s 10 --token-s 30

One service logs in by tokens of an endpoint, the other by a password. Exit status: 0 if every answer was 201, no term
has ended, and the topic has what the answers say; else 1.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from deploy import console
from deploy.stack import Redis
from tests.integration.client import Client
from tests.managed import Issuer, ManagedKafka, TokenEndpoint
from tests.managed.run import Fleet, load


async def run(folder: Path, seconds: float, reauth_s: float, token_s: float) -> int:
    issuer = Issuer(folder / "issuer")
    with (
        ManagedKafka(folder / "kafka", issuer, int(reauth_s * 1000)) as kafka,
        Redis(folder / "redis") as redis,
        TokenEndpoint(issuer, token_s) as endpoint,
    ):
        async with Client() as client:
            async with Fleet(folder, kafka, redis, endpoint) as fleet:
                found = await load(fleet, client, seconds)
            faults = await asyncio.to_thread(fleet.faults, client.history)
        console.say(
            f"{seconds:.0f} s, sessions of {reauth_s:g} s, tokens of {token_s:g} s ({endpoint.issued} issued): "
            f"answers {dict(found.answers)}, longest wait {found.longest_s:.2f} s, "
            f"{found.ended_terms:.0f} terms ended, {found.fences:.0f} slots fenced, {len(faults)} faults"
        )
        for fault in faults[:10]:
            console.say(fault)
        return int(set(found.answers) != {"201"} or found.ended_terms > 0 or found.fences > 0 or bool(faults))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.managed", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--reauth-s", type=float, default=10.0)
    parser.add_argument("--token-s", type=float, default=30.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="managed-") as folder:
        return console.run_loop(run(Path(folder), arguments.seconds, arguments.reauth_s, arguments.token_s))


if __name__ == "__main__":
    console.run(main)
