"""The body of a POST as it arrives: cut into the texts of its events, window by window, within bounds of memory."""

import asyncio
import time
from typing import Any, Final, Protocol

from starlette.types import Message, Receive

from service.core.problems import NOT_WRITTEN, REQUEST_TIMEOUT, Problem
from service.core.time_slice import TimeSlice
from service.http.encodings import Decoder
from service.http.request import BODIES_ARE_FULL, OWN_BYTES, Bodies, BodyUse, ClientGone, Share, StopSignal
from service.http.request_reader import LEAST_BYTES_S, SILENCE_MAX_S
from service.pipeline.request import CHUNK_EVENTS_MAX

# Bytes and events of a window, which are read before the first of them is written: enough for a whole transaction of
# events of 1 KB.
WINDOW_BYTES: Final = 1024 * 1024
WINDOW_EVENTS: Final = CHUNK_EVENTS_MAX
# The time to wait for more of the body before a window that is not full is written: a client that sends one event and
# waits for its result waits so much longer. No window is open for longer than WINDOW_S.
WINDOW_LINGER_S: Final = 0.001
WINDOW_S: Final = 0.01
# The longest time without an event in a stream whose decoder holds a window, which counts in the memory of all bodies.
IDLE_WINDOW_MAX_S: Final = 60.0

# The text of one event, or the problem that takes its place.
Text = bytes | Problem


class Splitter(Protocol):
    """Cuts a body that arrives in parts into the texts of its events."""

    @property
    def held(self) -> int:
        """The bytes in memory."""

    @property
    def is_over(self) -> bool:
        """Whether what follows in the body cannot be cut, as behind a syntax error; the stream ends then."""

    @property
    def has_unread(self) -> bool:
        """Whether `next` has not looked at all of the last part, so that a call may return a text after None."""

    def feed(self, data: bytes) -> None:
        """Take the next part of the body, after `next` has returned None and nothing is unread."""

    def next(self) -> Text | None:
        """Return the next text, or the problem that takes its place; None without a whole one."""

    def drop(self, problem: Problem) -> None:
        """Drop the incomplete text, as far as it has come and what is still to come: `problem` is its result.

        Between two texts nothing is dropped.
        """

    def end(self) -> None:
        """Note that the body has ended; `next` may return a last text."""


async def next_text(splitter: Splitter, time_slice: TimeSlice) -> Text | None:
    """Search what the splitter was fed for the next text, in time slices; return None without a whole text."""
    while True:
        if time_slice.is_over:
            await time_slice.next()
        text = splitter.next()
        if text is not None or not splitter.has_unread:
            return text


class StreamedBody:
    """The body of a request as it arrives, decoded. The server's next message is awaited when there is room for it."""

    def __init__(self, receive: Receive, stopping: StopSignal, bodies: Bodies, use: BodyUse) -> None:
        """`use.is_begun` becomes true when the first part of the body comes."""
        self._receive = receive
        self._use = use
        self._stopping = stopping
        self._stopped: asyncio.Future[None] | None = None
        self._coming: asyncio.Task[Message] | None = None  # the next message, if it was asked for
        self._memory = Share(bodies)
        self._waited_s = 0.0  # for the text that is incomplete
        self._idle_s = 0.0  # waited since the last text
        self._fault: Problem | None = None  # of the body, raised after the window that was read before it
        self.decoder = Decoder("")  # for the content coding of the body
        self._complete = False  # the server has sent all of it
        self._ended = False  # the end was passed on to decoder and splitter
        self.begun = False  # a message was asked for, at which a server sends 100 Continue

    async def next_window(self, splitter: Splitter, events_max: int, bytes_max: int) -> list[Text]:
        """Return the next texts: those that are there without waiting, or else the next one.

        They are at most `events_max`, and none follows that with which they have `bytes_max` bytes.
        Returns nothing at the end of the body. Raises Problem (408, 503) if the body cannot be read on, and ClientGone.
        """
        if self._fault is not None:
            raise self._fault
        window = _Window(events_max, bytes_max)
        try:
            await self._fill(window, splitter)
        except Problem as problem:
            if not window.texts:
                raise
            self._fault = problem
        return window.texts

    async def _fill(self, window: "_Window", splitter: Splitter) -> None:
        """Add texts to a window, until it is full, or no more of the body is there. Raises what next_window does."""
        time_slice = TimeSlice()
        while not window.is_full and not splitter.is_over:
            text = await next_text(splitter, time_slice)
            if text is not None:
                window.add(text)
                self._waited_s = self._idle_s = 0.0
            elif not await self._feed(window, splitter):
                return

    async def _feed(self, window: "_Window", splitter: Splitter) -> bool:
        """Feed the splitter or the decoder with more of the body; return False to write the window without more.

        An empty window is fed until the body ends.
        """
        piece = self.decoder.next()
        if piece is not None:
            splitter.feed(piece)
            return True
        if self._complete:
            return self._end(splitter)
        if not self._memory.resize(self.decoder.held + splitter.held + window.bytes):
            if not window.texts:
                _drop_incomplete(splitter)
            return not window.texts
        if window.texts and not await self._is_there(window.time_left):
            return False
        self.decoder.feed(await self._read(splitter.held))
        return True

    def _end(self, splitter: Splitter) -> bool:
        """End the decoder and the splitter; return False if that was done before."""
        if self._ended:
            return False
        self._ended = True
        self.decoder.end()
        splitter.end()
        return True

    def _ask(self) -> "asyncio.Task[Message]":
        """Ask the server for the next message, once."""
        if self._coming is None:
            self.begun = True
            self._coming = asyncio.get_running_loop().create_task(_received(self._receive, self._use))
        return self._coming

    async def pause(self, seconds: float) -> None:
        """Wait for a time, or until the next message comes. Raises Problem (503) for a stop, and ClientGone."""
        coming = self._ask()
        waiting: set[asyncio.Future[Any]] = {self._stop} if coming.done() else {self._stop, coming}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_stopping()
        if coming.done() and coming.result()["type"] == "http.disconnect":
            raise ClientGone

    @property
    def _stop(self) -> asyncio.Future[None]:
        """A future that is done once the process is stopping."""
        self._stopped = self._stopped or self._stopping.future()
        return self._stopped

    def _raise_if_stopping(self) -> None:
        if self._stop.done():
            raise Problem(NOT_WRITTEN, "this process is stopping")

    async def _is_there(self, within_s: float) -> bool:
        """Wait for the next message, for a time in seconds; return whether it has come."""
        await asyncio.wait({self._ask()}, timeout=within_s)
        return self._ask().done()

    async def _read(self, held: int) -> bytes:
        """Return the next part of the body, which may be empty; `held` bytes of an incomplete text were read before.

        Raises Problem (408, 503), and ClientGone.
        """
        coming, since = self._ask(), time.monotonic()
        either: set[asyncio.Future[Any]] = {coming, self._stop}
        self._waited_s = self._waited_s if held else 0.0
        left_s = min(SILENCE_MAX_S, SILENCE_MAX_S + held / LEAST_BYTES_S - self._waited_s)
        await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_stopping()
        if not coming.done():
            raise Problem(REQUEST_TIMEOUT, _silence(left_s))
        waited_s = time.monotonic() - since
        self._waited_s += waited_s
        self._idle_s += waited_s
        if not held and self._idle_s > IDLE_WINDOW_MAX_S and self.decoder.held > OWN_BYTES:
            why = f"no event came for {IDLE_WINDOW_MAX_S:g} s within a frame: end the frame before a pause"
            raise Problem(REQUEST_TIMEOUT, f"body: {why}")
        self._coming = None
        message = coming.result()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self._complete = not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return part

    async def close(self) -> None:
        """Read nothing more, and hold nothing."""
        self._memory.resize(0)
        if self._stopped is not None:
            self._stopped.cancel()
        if self._coming is not None:
            self._coming.cancel()
            await asyncio.wait({self._coming})


def _drop_incomplete(splitter: Splitter) -> None:
    """Drop the incomplete text; raise Problem (503) if there is none, and it is the decoder that has the memory."""
    if not splitter.held:
        raise Problem(NOT_WRITTEN, BODIES_ARE_FULL)
    splitter.drop(Problem(NOT_WRITTEN, f"{BODIES_ARE_FULL}: send this event again"))


async def _received(receive: Receive, use: BodyUse) -> Message:
    message = await receive()
    use.is_begun |= message["type"] == "http.request"
    return message


def _silence(left_s: float) -> str:
    """Explain a 408: a text that has had its time at the least rate may be silent for less than SILENCE_MAX_S."""
    why = (
        f"nothing came for {SILENCE_MAX_S:g} s"
        if left_s == SILENCE_MAX_S
        else f"less than {LEAST_BYTES_S} bytes a second of an event came"
    )
    return f"body: {why}"


class _Window:
    """The next texts of a body, and their bounds."""

    def __init__(self, events_max: int, bytes_max: int) -> None:
        self.texts: list[Text] = []
        self.bytes = 0
        self._events_max = events_max
        self._bytes_max = bytes_max
        self._opened_at = 0.0  # when the first text was added

    def add(self, text: Text) -> None:
        if not self.texts:
            self._opened_at = time.monotonic()
        self.texts.append(text)
        self.bytes += len(text) if isinstance(text, bytes) else 0

    @property
    def is_full(self) -> bool:
        return len(self.texts) >= self._events_max or self.bytes >= self._bytes_max

    @property
    def time_left(self) -> float:
        """The time, in seconds, to wait for more of the body."""
        return min(WINDOW_LINGER_S, max(0.0, self._opened_at + WINDOW_S - time.monotonic()))
