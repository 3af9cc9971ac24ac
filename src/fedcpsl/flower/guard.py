"""Run as a program: ends the process groups told on standard input once whoever told them is gone."""

import os
import signal
import sys
import time

GRACE_S = 5.0


def watch() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    groups = {group for group in groups if _send(group, signal.SIGTERM)}
    end = time.monotonic() + GRACE_S
    while groups and time.monotonic() < end:
        time.sleep(0.1)
        groups = {group for group in groups if _send(group, 0)}
    for group in groups:
        _send(group, signal.SIGKILL)


def _send(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    watch()
