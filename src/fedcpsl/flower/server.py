"""The server's app: the federation's rounds on Flower's grid."""

import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid

from fedcpsl.deployment.job import read_job
from fedcpsl.deployment.rounds import pause_after, rounds
from fedcpsl.errors import InputError
from fedcpsl.flower.grid import GridTransport


def run(grid: Grid, context: Context) -> None:
    """Serve the job that the run's config names, from where its folder is."""
    folder = Path(str(context.run_config["folder"]))
    path = folder / "job.toml"
    try:
        job = read_job(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    for state in rounds(GridTransport(grid, job.text), job, folder):
        time.sleep(pause_after(state))
