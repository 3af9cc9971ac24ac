"""The server's app: the federation's rounds on Flower's grid, and a file that says how they go."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid

from fedcpsl.errors import InputError
from fedcpsl.federation.privacy import epsilon
from fedcpsl.federation.server import serve
from fedcpsl.federation.server_store import Serving
from fedcpsl.flower.grid import GridTransport, Names
from fedcpsl.flower.job import Job, read_job, server_terms
from fedcpsl.flower.registry import names_by_node
from fedcpsl.runs.files import to_json, write_whole

LOG = logging.getLogger("fedcpsl")
IDLE = 1.0  # seconds between turns in which nobody worked


def run(grid: Grid, context: Context) -> None:
    """Serve the job that the run's config names, from where its folder is."""
    folder = Path(str(context.run_config["folder"]))
    path = folder / "job.toml"
    try:
        job = read_job(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    names = partial(names_by_node, folder / "flwr") if context.run_config["keys"] else None
    for state in rounds(grid, job, folder, names):
        if not state.counted and not state.over:
            time.sleep(IDLE)


def rounds(grid: Grid, job: Job, folder: Path, names: Names | None) -> Iterator[Serving]:
    """Every turn of the job; status.json tells of each."""
    began = time.time()
    accuracy: dict[str, float] = {}
    transport = GridTransport(grid, job.text, names)
    for state in serve(server_terms(job), job.rules, folder / "server", transport):
        accuracy |= state.accuracy
        status = status_of(job, state, accuracy, transport.present() if not state.over else [], began)
        write_whole(folder / "status.json", to_json(status, indent=2) + "\n")
        for reason in state.dropouts.values():
            LOG.warning("%s", reason)
        if state.counted:
            LOG.info("round %s: counted %s", state.round, ", ".join(state.counted))
        yield state


def status_of(job: Job, state: Serving, accuracy: dict[str, float], online: list[str], began: float) -> dict[str, Any]:
    """What `fedcpsl status` shows."""
    devices = [
        {
            "name": member.name,
            "labelled": member.labelled,
            "unlabelled": member.unlabelled,
            "online": member.name in online,
            "last_counted": None if member.counted is None else member.counted.round,
            "accuracy": accuracy.get(member.name),
            "problem": state.dropouts.get(member.name),
        }
        for member in state.roster
    ]
    return {
        "run": state.run,
        "round": state.round,
        "rounds": job.rules.rounds,
        "attempt": state.turn.attempt,
        "over": state.over,
        "began": began,
        "updated": time.time(),
        "privacy": privacy_of(job, state),
        "waiting_for": max(0, job.rules.least - len(state.roster)),
        "devices": devices,
        "strangers": {name: why for name, why in state.dropouts.items() if name not in {d["name"] for d in devices}},
    }


def privacy_of(job: Job, state: Serving) -> dict[str, float] | None:
    """The epsilon of the device that was asked most often; None where the job asks for no noise."""
    if not job.protection.noise:
        return None
    most = max((member.asked for member in state.roster), default=0)
    return {"epsilon": epsilon(job.protection.noise, most, job.delta), "delta": job.delta, "updates": most}
