"""A split in the terminal: who holds how many samples of which class, labelled or not."""

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.split import LABELLED, ROLES, UNLABELLED, VALIDATION

MOST_DEVICES, MOST_CLASSES = 30, 40
SHADES = " ░▒▓█"


def in_memory(federation: Federation | OnDemand, console: Console) -> Federation:
    """The federation, or as many of its devices as are shown where their samples are made on demand."""
    if isinstance(federation, Federation):
        return federation
    shown = min(MOST_DEVICES, federation.devices)
    console.print(f"{federation.devices:,} devices, whose samples are made on demand; the first {shown}:")
    return federation.held(range(shown))


def split_table(federation: Federation) -> Table:
    """Who holds what: labelled, unlabelled and test samples, and the classes."""
    table = Table(title=f"{federation.devices} devices, {federation.classes} classes", title_justify="left")
    table.add_column("device")
    shown = [role for role in range(len(ROLES)) if role != VALIDATION or federation.counts[:, role].any()]
    for role in shown:
        table.add_column(ROLES[role], justify="right")
    table.add_column("classes (known samples)")
    per_class = np.sum([federation.class_counts(role) for role in range(len(ROLES))], 0)
    classes = federation.class_names or tuple(map(str, range(federation.classes)))
    for i, name in enumerate(federation.names[:MOST_DEVICES]):
        held = [f"{c}: {n}" for c, n in zip(classes, per_class[i], strict=True) if n]
        table.add_row(Text(name), *(str(n) for n in federation.counts[i, shown]), Text(", ".join(held)))
    if federation.devices > MOST_DEVICES:
        table.add_row("...", *("",) * (len(shown) + 1))
    table.add_section()
    table.add_row("all", *(str(n) for n in federation.counts[:, shown].sum(0)), "")
    return table


def class_picture(federation: Federation) -> Table:
    """Devices by classes, the darker the more: what a device sees labelled on the left, unlabelled on the right."""
    labelled, unlabelled = (federation.class_counts(role) for role in (LABELLED, UNLABELLED))
    unknown = unknown_counts(federation)
    shown = [(labelled, labelled.max()), (unlabelled, max(unlabelled.max(), unknown.max()))]
    says = "?: unlabelled, class unknown" if unknown.any() else "known samples"
    grid = Table(title=f"devices by classes ({says})", title_justify="left", box=None, padding=(0, 1))
    grid.add_column("device")
    for name, (_, most) in zip(("labelled", "unlabelled"), shown, strict=True):
        grid.add_column(f"{name}, most {most}", no_wrap=True)
    if unknown.any():
        grid.add_column("?", no_wrap=True)
        shown.append((unknown[:, None], shown[1][1]))
    for i, name in enumerate(federation.names[:MOST_DEVICES]):
        grid.add_row(Text(name), *(_shaded(counts[i], most) for counts, most in shown))
    if federation.devices > MOST_DEVICES:
        grid.add_row("...")
    return grid


def unknown_counts(federation: Federation) -> NDArray[np.int64]:
    """Every device's unlabelled samples whose class nobody knows."""
    counts: NDArray[np.int64] = federation.counts[:, UNLABELLED] - federation.class_counts(UNLABELLED).sum(1)
    return counts


def _shaded(counts: np.ndarray, most: int) -> Text:
    """One row of cells; any sample at all is seen."""
    levels = np.ceil(counts / max(most, 1) * (len(SHADES) - 1)).astype(int)
    cells = "".join(2 * SHADES[level] for level in levels[:MOST_CLASSES])
    return Text("▕" + cells + "▏" + ("..." if len(counts) > MOST_CLASSES else ""))
