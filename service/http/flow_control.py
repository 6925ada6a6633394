"""Flow control of a connection: when the service reads on, while a client does not read or bytes are to be parsed."""

import asyncio

from uvicorn.protocols.http.flow_control import FlowControl


class BothWays(FlowControl):
    """Pause reading while the client does not read its responses, and while received bytes are not parsed.

    An app that answers before it has read the whole body bounds by itself what it reads ahead of its client. A client
    that sends all before it reads would never get on if reading paused then.
    """

    parsing = False  # received bytes are still to be parsed
    is_duplex = False  # the app has begun its answer, and reads the body as it arrives

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.transport = transport

    def pause_writing(self) -> None:
        super().pause_writing()
        if not self.is_duplex:
            self.pause_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.resume_reading()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            if not self.parsing:
                self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and (self.is_duplex or not self.write_paused):
            self.read_paused = False
            if not self.parsing:
                self.transport.resume_reading()

    def set_duplex(self, is_duplex: bool) -> None:
        """Note whether the app answers and reads the body at the same time."""
        self.is_duplex = is_duplex
        if self.write_paused and not is_duplex:
            self.pause_reading()

    def set_parsing(self, parsing: bool) -> None:
        """Note whether received bytes are still to be parsed."""
        if parsing is not self.parsing:
            self.parsing = parsing
            if not self.read_paused:
                (self.transport.pause_reading if parsing else self.transport.resume_reading)()
