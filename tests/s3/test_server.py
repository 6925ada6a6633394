"""Tests what the other tests of this folder need: of conditional writes of one object the server carries out one."""

import hashlib
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

from tests.s3.server import WAIT_S, Server

RACES = 100
WRITES = 8


def test_of_conditional_puts_that_arrive_at_once_one_is_carried_out(server: Server) -> None:
    folder = uuid.uuid4().hex
    bodies = [f"by {n}".encode() * 1000 for n in range(WRITES)]
    with ThreadPoolExecutor(WRITES) as threads:
        for race in range(RACES):
            name = f"{folder}/{race}"
            with server.holding(name, WRITES) as held:
                results = [threads.submit(server.request, "PUT", name, body, if_absent=True) for body in bodies]
                held.wait()
                held.release()
                statuses = [result.result(WAIT_S)[0] for result in results]
            assert sorted(statuses) == [200, *[412] * (WRITES - 1)], race
            assert server.get(name) == bodies[statuses.index(200)]


def test_of_uploads_in_parts_that_are_completed_at_once_one_is_carried_out(server: Server) -> None:
    folder = uuid.uuid4().hex
    bodies = [f"by {n}".encode() * 1000 for n in range(WRITES)]
    with ThreadPoolExecutor(WRITES) as threads:
        for race in range(RACES):
            name, start = f"{folder}/{race}", Barrier(WRITES)
            uploads = [_upload(server, name, body) for body in bodies]
            complete = partial(_complete, server, name, start)
            statuses = list(threads.map(complete, uploads, bodies))
            assert sorted(statuses) == [200, *[412] * (WRITES - 1)], race
            assert server.get(name) == bodies[statuses.index(200)]


def _upload(server: Server, name: str, body: bytes) -> str:
    """Upload an object in one part, but for its completion; returns the id of the upload."""
    status, begun = server.request("POST", f"{name}?uploads")
    found = re.search(rb"<UploadId>([^<]+)</UploadId>", begun)
    assert status == 200
    assert found is not None
    upload = found[1].decode()
    assert server.request("PUT", f"{name}?partNumber=1&uploadId={upload}", body)[0] == 200
    return upload


def _complete(server: Server, name: str, start: Barrier, upload: str, body: bytes) -> int:
    """Complete an upload on the condition that there is no such object; returns the status."""
    part = f'<Part><PartNumber>1</PartNumber><ETag>"{hashlib.md5(body).hexdigest()}"</ETag></Part>'
    parts = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    start.wait(WAIT_S)
    return server.request("POST", f"{name}?uploadId={upload}", parts, if_absent=True)[0]
