"""FedCPSL as a plain Flower app, for trials on one machine. It has no protection of its own."""

from pathlib import Path

APP = Path(__file__).parent / "app"  # what `flwr run` is given
