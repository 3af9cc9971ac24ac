"""A terminal of a given width, to see what a person would see."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time

import matplotlib

from .command import PATIENCE_S, environment


class Terminal:
    """A program with a terminal of its own around it."""

    def __init__(self, *command, cwd, columns=100, env=()):
        self.screen, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        surroundings = environment() | {"TERM": "xterm", "COLUMNS": str(columns), "HOME": str(cwd)}
        surroundings |= {"MPLCONFIGDIR": matplotlib.get_cachedir()} | dict(env)  # its fonts are listed there already
        self.process = subprocess.Popen(
            list(map(str, command)), cwd=cwd, env=surroundings, stdin=other, stdout=other, stderr=other, close_fds=True
        )
        os.close(other)

    def type(self, text):
        os.write(self.screen, text.encode())

    def read_until(self, done, seconds=PATIENCE_S):
        """What is printed until the text so far is enough, or the program ends."""
        text, end = "", time.monotonic() + seconds
        while not done(text) and time.monotonic() < end:
            if select.select([self.screen], [], [], 0.1)[0]:
                try:
                    text += os.read(self.screen, 65536).decode(errors="replace")
                except OSError:  # Linux, when the program has ended
                    break
        return text

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


def seen_in_terminal(*command, cwd, columns=100, env=()):
    """All that a command prints, and its exit code."""
    terminal = Terminal(*command, cwd=cwd, columns=columns, env=env)
    try:
        text = terminal.read_until(lambda _: False)
        return text.replace("\r\n", "\n"), terminal.process.wait(timeout=PATIENCE_S)
    finally:
        terminal.close()
