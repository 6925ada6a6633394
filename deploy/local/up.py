"""`./deploy/local/up`: runs the stack in the foreground."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from deploy.console import bold, dim, green, progress, run, say
from deploy.places import local_folder
from deploy.stack import Kafka, Process, Redis, Service, StackError, port_or_free

TOPIC = "demo"
_TOPIC_PARTITIONS = 4
_LOOK_S = 0.25  # between two checks that all parts run

# Variables with these prefixes are set by the stack alone: it never connects to another Kafka or Redis, nor uses their
# passwords.
_OURS = ("FENCEPOST_KAFKA", "FENCEPOST_REDIS", "FENCEPOST_HOST", "FENCEPOST_PORT")


def main() -> NoReturn:
    """Start all parts, print their addresses, and run until a signal."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(local_folder())
        stack.callback(say, "stopped")
        kafka = Kafka(folder, port=port_or_free(9092))
        redis = Redis(folder, port=port_or_free(6379))
        wanted = os.environ.get("FENCEPOST_PORT", "")
        service = Service(
            folder,
            kafka=kafka.bootstrap,
            redis=redis.url,
            port=port_or_free(int(wanted) if wanted.isdecimal() else 8000),
            env=callers_settings(os.environ),
        )
        _start(stack, "Kafka", kafka, kafka.bootstrap)
        _start(stack, "Redis", redis, redis.url)
        if TOPIC not in kafka.topics():  # the data of an earlier run is kept
            kafka.create_topic(TOPIC, partitions=_TOPIC_PARTITIONS)
        _start(stack, "service", service, service.url)
        stack.enter_context(_addresses(folder / "env", kafka, redis, service))
        say(f"  topic    {TOPIC}")
        say(f"  logs     {folder}")
        say(dim("Ctrl-C stops all"))
        say(f"{green('ready')} {bold(service.url)}")
        _stay(kafka, redis, service)


def _start(stack: contextlib.ExitStack, what: str, process: Process, where: str) -> None:
    with progress(f"starting {what}"):
        stack.enter_context(process)
    say(f"  {what:8} {where}")


def _stay(*processes: Process) -> NoReturn:
    """Watch the parts until a signal ends the process.

    Raises:
        StackError: a part has ended.
    """
    while True:
        for process in processes:
            if not process.running:
                raise StackError(f"{process.name} ended with code {process.exit_code}\n{process.tail()}")
        time.sleep(_LOOK_S)


def callers_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's settings for the service, except those that the stack sets."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("FENCEPOST_") and not name.startswith(_OURS)
    }


@contextlib.contextmanager
def _addresses(file: Path, kafka: Kafka, redis: Redis, service: Service) -> Iterator[None]:
    """Write the addresses to a file for a shell to source; remove it at the end."""
    lines = {"KAFKA": kafka.bootstrap, "REDIS": redis.url, "URL": service.url}
    file.write_text("".join(f"FENCEPOST_{name}={value}\n" for name, value in lines.items()))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    run(main)
