"""`python -m fedcpsl`, and the `fedcpsl` command."""

import os
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line and exit with its code, without waiting for PyTorch to be taken apart (half a second)."""
    from fedcpsl.cli import run_command

    code = run_command(sys.argv[1:])
    for output in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError, ValueError):  # closed by the reader, or by us because of that
            output.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
