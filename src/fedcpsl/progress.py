"""Progress bars on stderr that vanish when the work is done and stay silent where stderr is no terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

WIDE = 80  # columns from which on a bar has room for everything beside it
T = TypeVar("T")


def track(items: Iterable[T], description: str, total: int | None = None) -> Iterator[T]:
    """The items one by one, with a bar. `total` is their number where they cannot say it themselves."""
    if not _watched():
        yield from items
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    said, count, left = TextColumn("{task.description}", markup=False), MofNCompleteColumn(), TimeRemainingColumn()
    columns = (said, BarColumn(), count, left) if console.width >= WIDE else (count, left)
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(items, total=total, description=description)


@contextmanager
def bytes_bar(description: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar for a download, and a function to call with the number of bytes that have arrived since."""
    if not _watched():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    said, arrived, left = TextColumn("{task.description}", markup=False), DownloadColumn(), TimeRemainingColumn()
    columns = (said, BarColumn(16), arrived, TransferSpeedColumn(), left) if console.width >= WIDE else (arrived, left)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.advance(task, count)


def _watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
