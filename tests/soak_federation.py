"""A federation under fire: real processes, TLS, keys, and SIGKILLs at random. `make soak` runs it; it takes minutes.

Devices and the server are killed in turn at random moments, and started again. At the end all rounds were counted,
c = sum_i w_i c_i holds, and every device has kept its state.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from fedcpsl.deployment.job import job_terms
from fedcpsl.federation.device import resolve_pending
from tests.federation_desk import Desk, furthest


def kill_something(desk: Desk, rng: random.Random, what: str) -> None:
    name = rng.choice(desk.names) if what == "device" else "server"
    if desk.processes[name].poll() is not None:  # the server has come to its end
        return
    print(f"{time.strftime('%X')} SIGKILL {name}", flush=True)
    desk.processes[name].kill()
    desk.processes[name].wait()
    if name == "server":
        desk.serve()
    else:
        desk.join(name)


def odd_devices(folder: Path) -> None:
    """Devices that join late, leave for good, send NaN or another model's shapes, or whose disk is full."""
    desk = Desk(folder, devices=7, rounds=10, active=5, deadline=30, min_devices=5)
    dev0, dev1, leaver, late, *odd = desk.names
    kinds = dict(zip(odd, ("nan", "shapes", "full"), strict=True))
    try:
        desk.serve()
        for name in (dev0, dev1, leaver, *odd):
            desk.join(name, odd=kinds.get(name, ""))
        desk.wait(lambda status: status["round"] >= 2, 300)
        desk.join(late)
        desk.wait(lambda status: status["round"] >= 4, 300)
        desk.processes[leaver].terminate()
        desk.wait(lambda status: status["over"], 900)
        desk.processes["server"].wait(60)
    except BaseException:
        print(desk.logs())
        raise
    finally:
        desk.close()
    said = (folder / "server.log").read_text()
    state = desk.server_state()
    assert state.round == 10
    assert late in [member.name for member in state.roster]
    assert len(state.roster) == 7
    assert {m.name for m in state.roster if m.counted is None} == {n for n, kind in kinds.items() if kind != "full"}
    assert state.epoch == 0  # nobody was hostile, so control variates went on
    for words in ("delta has numbers that are not finite", "delta has shape", "No space left on device"):
        line = next(line for line in said.splitlines() if words in line)
        print(line)
    gap = gap_of(desk, state)
    print(f"10 rounds with {len(state.roster)} devices; |c - sum_i w_i c_i| = {gap:.2e}")
    assert gap < 1e-5


def gap_of(desk: Desk, state) -> float:
    """|c - sum_i w_i c_i|, with every c_i as it is once the device knows what the server counted."""
    terms = job_terms(desk.job)
    known = {
        m.name: resolve_pending(terms, desk.device_state(m.name), m.counted, m.factor).committed.c for m in state.roster
    }
    total = sum(m.samples / state.samples * known[m.name] for m in state.roster)
    return float((state.server.c - total).abs().max())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=400)
    options.add_argument("--devices", type=int, default=5)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--calm", action="store_true", help="no kills; compare with the simulator instead")
    options.add_argument("--minutes", type=float, default=25)
    options.add_argument("--odd", action="store_true", help="devices that misbehave instead of kills")
    chosen = options.parse_args()
    torch.set_num_threads(1)  # as the devices have: sums of float32 numbers depend on it
    if chosen.odd:
        with tempfile.TemporaryDirectory() as folder:
            odd_devices(Path(folder))
        return
    rng = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        active = chosen.devices if chosen.calm else 3
        desk = Desk(Path(folder), devices=chosen.devices, rounds=chosen.rounds, active=active, deadline=45)
        kills = [] if chosen.calm else ["device", "server"] * 9
        rng.shuffle(kills)
        at = sorted(rng.sample(range(1, chosen.rounds), min(len(kills), chosen.rounds - 1)))
        began = time.monotonic()
        try:
            desk.serve()
            for name in desk.names:
                desk.join(name)
            for round, what in zip(at, kills, strict=False):
                desk.wait(lambda status, r=round: status["round"] >= r or status["over"], 60 * chosen.minutes)
                time.sleep(3 * rng.random())
                kill_something(desk, rng, what)
            status = desk.wait(lambda status: status["over"], 60 * chosen.minutes)
            desk.processes["server"].wait(60)
        except BaseException:
            print(desk.logs())
            raise
        finally:
            desk.close()
        print(f"{status['round']} rounds in {time.monotonic() - began:.0f} s with {len(kills)} kills")
        state = desk.server_state()
        assert state.round == chosen.rounds
        assert len(state.roster) == chosen.devices
        behind = [m.name for m in state.roster if desk.device_state(m.name).counted != m.counted]
        print(f"devices that have not yet heard of their last counted round: {behind or 'none'}")
        gap = gap_of(desk, state)
        print(f"|c - sum_i w_i c_i| = {gap:.2e}")
        assert gap < 1e-5
        for member in state.roster:
            assert np.isfinite(desk.device_state(member.name).committed.theta_lc.numpy()).all()
        if chosen.calm:
            print(f"furthest from the simulator: {furthest(desk):.2e}")
            assert furthest(desk) < 1e-6


if __name__ == "__main__":
    main()
