"""`python -m tests.bench.empty`: an empty FastAPI handler, which parses the same body and sends an answer."""

import os
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


class Event(BaseModel):
    """The body of POST /events."""

    topic: str
    key: str | None = None
    value: Any = None
    headers: dict[str, str] | None = None
    partition: int | None = None
    timestamp: int | None = None


app = FastAPI()


@app.post("/events", status_code=201)
async def post_event(event: Event) -> dict[str, Any]:
    return {"id": "0" * 32, "topic": event.topic, "partition": 0, "offset": 0, "timestamp": 0}


@app.get("/readyz")
async def readyz() -> dict[str, bool]:
    return {"ready": True}


def main() -> int:
    # The settings of service/__main__.py, with uvicorn's own httptools protocol.
    uvicorn.run(
        app,
        host=os.environ["FENCEPOST_HOST"],
        port=int(os.environ["FENCEPOST_PORT"]),
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        backlog=4096,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
