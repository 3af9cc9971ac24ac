"""Orders that wait for their devices, and answers that wait for the server's loop: between two threads.

An order stays until it is answered or its time is up. A device that fetches it again (for it died, or the line broke)
gets it again, and answers as it did before.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from fedcpsl.deployment.wire import pack
from fedcpsl.federation.messages import TRAIN, Lost, Message

PRESENT_S = 60.0  # after its last request a device counts as connected
GRACE_S = 20.0  # after the start devices have this long to connect before they count as absent
LOOK_S = 0.5
SMALL = 1 << 16  # bytes of an answer without tensors
Banned = Callable[[], set[str]]


class Mailbox:
    """What the HTTP server and the federation's loop share; a transport for the latter."""

    def __init__(self, job: str, update_bytes: int, banned: Banned = set, clock: Callable[[], float] = time.monotonic):
        self._job, self._update_bytes, self._banned, self._clock = job, update_bytes, banned, clock
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}
        self._orders: dict[str, Message] = {}
        self._fetched: set[str] = set()
        self._sending: set[str] = set()
        self._waiting: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = {}
        self._answers: queue.Queue[tuple[str, Message | Lost]] = queue.Queue()
        self._began = clock()

    # For the federation's loop.

    def present(self) -> list[str]:
        """The devices that were heard of lately, or are at work."""
        now, banned = self._clock(), self._banned()
        with self._lock:
            near = {name for name, at in self._seen.items() if now - at < PRESENT_S}
            return sorted((near | self._fetched & set(self._orders) | set(self._waiting)) - banned)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:
        """Offer every device its order, and yield answers as they come until all are there or time is up."""
        end, open_orders = self._clock() + deadline, set(messages)
        self._answers = queue.Queue()
        with self._lock:
            self._orders, self._fetched = dict(messages), set()
            for name in messages:
                self._wake(name)
        try:
            while open_orders:
                for name, why in self._hopeless(open_orders):
                    open_orders.discard(name)
                    yield name, Lost(why)
                with suppress(queue.Empty):
                    name, answer = self._answers.get(timeout=max(0.0, min(LOOK_S, end - self._clock())))
                    open_orders.discard(name)
                    yield name, answer
                if self._clock() >= end:
                    return
        finally:
            with self._lock:
                self._orders = {}

    def _hopeless(self, names: set[str]) -> list[tuple[str, str]]:
        """Who of them cannot answer any more."""
        banned, near = self._banned(), set(self.present())
        started = self._clock() - self._began > GRACE_S
        found = [(name, "its key was revoked") for name in names & banned]
        return found + [(name, "it is not connected") for name in names - banned - near if started]

    # For the HTTP server.

    async def next_order(self, name: str, seconds: float) -> bytes | None:
        """A device's order, as soon as there is one; None after some seconds without."""
        loop = asyncio.get_running_loop()
        waits: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._seen[name] = self._clock()
            nothing_yet = name not in self._orders
            if nothing_yet:
                self._wake(name)  # an earlier request of the same device is answered: there is nothing
                self._waiting[name] = loop, waits
        if nothing_yet:
            with suppress(TimeoutError):
                await asyncio.wait_for(waits, seconds)
        with self._lock:
            self._seen[name] = self._clock()
            if self._waiting.get(name, (loop, None))[1] is waits:
                del self._waiting[name]
            order = self._orders.get(name)
            if order is None:
                return None
            self._fetched.add(name)
        return await asyncio.to_thread(pack, order, self._job)

    def most_bytes(self, name: str) -> int:
        """How large an answer of a device may be now; 0: none is awaited, or one is on its way."""
        with self._lock:
            self._seen[name] = self._clock()
            if name not in self._orders or name in self._sending:
                return 0
            return self._update_bytes + SMALL if self._orders[name].header.get("kind") == TRAIN else SMALL

    def sending(self, name: str, *, now: bool) -> None:
        """Note that an answer of a device is being received, or is no more."""
        with self._lock:
            (self._sending.add if now else self._sending.discard)(name)

    def put(self, name: str, answer: Message | Lost) -> bool:
        """Hand an answer to the loop; False where it is not awaited any more, or is to an earlier order."""
        with self._lock:
            order = self._orders.get(name)
            if order is None or (isinstance(answer, Message) and _turn_of(answer) != _turn_of(order)):
                return False
            del self._orders[name]
            self._answers.put((name, answer))
        return True

    def _wake(self, name: str) -> None:
        loop, waits = self._waiting.pop(name, (None, None))
        if loop is not None and waits is not None:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_finish, waits)


def _turn_of(message: Message) -> tuple[object, ...]:
    return tuple(message.header.get(name) for name in ("run", "round", "attempt"))


def _finish(waits: asyncio.Future[None]) -> None:
    if not waits.done():
        waits.set_result(None)
