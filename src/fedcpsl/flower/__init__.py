"""FedCPSL on Flower: the same functions on machines that hold their own data."""

from pathlib import Path

APP = Path(__file__).parent / "app"  # what `flwr run` is given
