"""A job's rounds over some transport, and a file that says how they go."""

import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedcpsl.deployment.job import Job, server_terms
from fedcpsl.federation.messages import Transport
from fedcpsl.federation.privacy import epsilon
from fedcpsl.federation.server import Names, serve
from fedcpsl.federation.server_store import Serving
from fedcpsl.storage import to_json, write_whole

LOG = logging.getLogger("fedcpsl")
IDLE_S, LONGEST_IDLE_S = 1.0, 60.0  # between turns in which nobody was counted
MOST_EVENTS = 20


def rounds(transport: Transport, job: Job, folder: Path, to_forget: Names = tuple) -> Iterator[Serving]:
    """Every turn of the job; status.json tells of each."""
    began = time.time()
    accuracy: dict[str, float] = {}
    events: list[dict[str, Any]] = []
    for state in serve(server_terms(job), job.rules, folder / "server", transport, to_forget):
        accuracy |= state.accuracy
        events = [*events, *({"time": time.time(), "text": text} for text in state.events)][-MOST_EVENTS:]
        online = [] if state.over else transport.present()
        status = status_of(job, state, accuracy, online, began) | {"events": events}
        write_whole(folder / "status.json", to_json(status, indent=2) + "\n", private=True)
        for reason in (*state.dropouts.values(), *state.events):
            LOG.warning("%s", reason)
        if state.counted:
            LOG.info("round %s: counted %s", state.round, ", ".join(state.counted))
        yield state


def pause_after(state: Serving) -> float:
    """Seconds until the next turn: none where somebody was counted, longer and longer where nobody is."""
    if state.counted or state.over:
        return 0.0
    return min(IDLE_S * 2 ** min(state.turn.attempt // 4, 10), LONGEST_IDLE_S)


def status_of(
    job: Job, state: Serving, accuracy: dict[str, float], online: Iterable[str], began: float
) -> dict[str, Any]:
    """What `fedcpsl status` shows."""
    connected = set(online)
    devices = [
        {
            "name": member.name,
            "labelled": member.labelled,
            "unlabelled": member.unlabelled,
            "online": member.name in connected,
            "last_counted": None if member.counted is None else member.counted.round,
            "accuracy": accuracy.get(member.name),
            "offences": member.offences,
            "excluded_until": member.excluded_until if member.excluded_until > state.round else None,
            "forgotten": member.forgotten,
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
        "waiting_for": 0 if state.begun else max(0, job.rules.least - len(state.roster)),
        "devices": devices,
        "strangers": {name: why for name, why in state.dropouts.items() if name not in {d["name"] for d in devices}},
    }


def privacy_of(job: Job, state: Serving) -> dict[str, float] | None:
    """The epsilon of the device that was asked most often; None where the job asks for no noise."""
    if not job.protection.noise:
        return None
    most = max((member.asked for member in state.roster), default=0)
    return {"epsilon": epsilon(job.protection.noise, most, job.delta), "delta": job.delta, "updates": most}
