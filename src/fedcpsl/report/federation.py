"""How a federation is doing, as a table."""

import time
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcpsl.report.terminal_width import print_table


def print_status(status: Mapping[str, Any]) -> None:
    """Devices, round, accuracy, who is late."""
    ago = max(0.0, time.time() - status["updated"])
    state = "over" if status["over"] else f"heard of {ago:.0f} s ago"
    title = f"round {status['round']} of {status['rounds']}, {state}"
    if status["waiting_for"]:
        title = f"waiting for {status['waiting_for']} more devices, {state}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column, side in (("device", "left"), ("labels", "right"), ("others", "right"), ("last counted", "right")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    table.add_column("accuracy", justify="right")
    table.add_column("")
    for device in status["devices"]:
        counted, accuracy = device["last_counted"], device["accuracy"]
        table.add_row(
            Text(device["name"]),
            str(device["labelled"]),
            str(device["unlabelled"]),
            "-" if counted is None else f"round {counted + 1}",
            "-" if accuracy is None else f"{100 * accuracy:.1f} %",
            Text(_remark(device, over=status["over"])),
        )
    for name, problem in status["strangers"].items():
        table.add_row(Text(name), "-", "-", "-", "-", Text(problem))
    console = Console()
    print_table(table, console)
    for event in status.get("events", ()):  # the server's own folder has them
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        console.print(Text(f"{when} {event['text']}"))
    if status["privacy"]:
        private = status["privacy"]
        console.print(
            f"a device has let go at most {private['updates']} noised updates: epsilon {private['epsilon']:.2f} at "
            f"delta {private['delta']:g}, against everybody, the server too"
        )


def _remark(device: Mapping[str, Any], *, over: bool) -> str:
    """What there is to say of a device, the gravest first."""
    if device.get("forgotten"):
        return "forgotten: it has no weight any more"
    if device.get("excluded_until") is not None:
        why = f": {device['problem']}" if device["problem"] else ""
        return f"not asked before round {device['excluded_until'] + 1}{why}"
    return device["problem"] or ("" if device["online"] or over else "not connected")
