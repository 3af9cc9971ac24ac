"""uvicorn's HTTP with little patience: who connects and sends no whole request is hung up on."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

FIRST_LINES_S = 15.0


class ImpatientProtocol(H11Protocol):
    """uvicorn has no limit of its own for the first request of a connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(FIRST_LINES_S, self._hang_up_on_silence)

    def _hang_up_on_silence(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
