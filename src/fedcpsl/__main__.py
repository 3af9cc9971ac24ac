"""`python -m fedcpsl`, and the `fedcpsl` command."""

import os
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line and exit with its code, without waiting for PyTorch to be taken apart (half a second)."""
    from fedcpsl.cli import run_command

    code = run_command(sys.argv[1:])
    try:
        with suppress(BrokenPipeError, ValueError, AttributeError):  # closed by the reader, by us, or from the start
            sys.stdout.flush()
    except OSError as error:
        print(f"fedcpsl: the output cannot be written: {error.strerror}", file=sys.stderr)
        code = 1
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
