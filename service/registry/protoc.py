"""Compiles the text of a Protobuf schema with protoc, of grpcio-tools: Google's own parser of .proto files.

protoc runs as a process of its own: it can be ended, and holds neither the event loop nor the interpreter's lock.
"""

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from service.registry import well_known
from service.registry.schema import Import, RegistryAway, SchemaType, SchemaUnusable

# What the file of the schema itself is called; no reference may have this name.
_LOGGED: Final = re.compile(r"WARNING: |[IW]\d{4} ")
MAIN: Final = "fencepost_schema.proto"
COMPILE_S: Final = 10.0
PAUSE_S: Final = 5.0
MEMORY: Final = "/dev/shm"  # noqa: S108 - the folder below it is made by tempfile
DESCRIPTOR_BYTES_MAX: Final = 4 * 1024 * 1024
_ERRORS_CHARS: Final = 300
_NAME: Final = re.compile(r"(?!.*(^|/)\.\.?(/|$))[\w.-]+(/[\w.-]+){0,15}", re.ASCII)


async def compiled(text: str, imports: Sequence[Import]) -> bytes:
    """Compile a schema with what it imports to a serialized FileDescriptorSet, whose last file is the schema's.

    Raises SchemaUnusable with protoc's messages, and RegistryAway if protoc cannot run now.
    """
    for each in imports:
        if each.schema.type is not SchemaType.PROTOBUF or len(each.name) > 255 or _NAME.fullmatch(each.name) is None:
            raise SchemaUnusable(f"its reference {each.name!r} is no Protobuf file with a relative path")
        if each.name == MAIN:
            raise SchemaUnusable(f"its reference {MAIN!r} has a reserved name")
    try:
        with tempfile.TemporaryDirectory(prefix="fencepost-protoc-", dir=_memory_folder()) as folder:
            return await _compile(Path(folder), text, imports)
    except OSError as error:  # the schema may be good
        why = f"protoc cannot run: {error.strerror}: let the process write to {MEMORY} or /tmp"
        raise RegistryAway(why, PAUSE_S, everywhere=False) from None


def _memory_folder() -> str | None:
    """Return a folder in memory that can be written, also where the image is read-only; None for the usual one."""
    return MEMORY if os.access(MEMORY, os.W_OK) else None


async def _compile(folder: Path, text: str, imports: Sequence[Import]) -> bytes:
    source, known, target = folder / "source", folder / "known", folder / "descriptors"
    for name, content in well_known.FILES.items():
        _write(known / name, content)
    for name, content in [(MAIN, text), *((each.name, each.schema.text) for each in imports)]:
        try:
            _write(source / name, content)
        except OSError as error:  # a name that is a file and a folder
            raise SchemaUnusable(f"its reference {name!r} cannot be written: {error.strerror}") from None
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-m", "grpc_tools.protoc"),
        # A reference precedes a well-known file of its name.
        *("-I.", f"-I{known}", "--include_imports", f"--descriptor_set_out={target}", MAIN),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=source,
    )
    try:
        async with asyncio.timeout(COMPILE_S):
            _, errors = await process.communicate()
    except TimeoutError:
        raise RegistryAway(f"protoc did not compile it within {COMPILE_S:g} s", PAUSE_S, everywhere=False) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode is None or process.returncode < 0:  # the kernel may have ended it
        raise RegistryAway(f"protoc ended with {process.returncode}", PAUSE_S, everywhere=False)
    if process.returncode:
        raise SchemaUnusable(_why(errors))
    if target.stat().st_size > DESCRIPTOR_BYTES_MAX:
        raise SchemaUnusable(f"its descriptors have more than {DESCRIPTOR_BYTES_MAX} bytes")
    return target.read_bytes()


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def _why(errors: bytes) -> str:
    """Return the first errors of protoc: `line:column: message`."""
    lines = [line for line in errors.decode(errors="replace").splitlines() if line and not _LOGGED.match(line)]
    lines = [line.removeprefix(f"{MAIN}:") for line in lines]
    return f"protoc refuses it: {'; '.join(lines)[:_ERRORS_CHARS] or 'without a reason'}"
