"""`python -m fedcpsl`, and the `fedcpsl` command."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from fedcpsl.cli import run_command

    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
