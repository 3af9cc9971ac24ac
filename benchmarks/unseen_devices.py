"""What does a device get that was not in training? The global model, its class prior, or a model of its own.

    python benchmarks/unseen_devices.py [--seeds 5] [--rounds 100] [--out FOLDER]

Digits on 20 devices of two classes each with a tenth of the labels; 15 train, and 5 come afterwards, as with `fedcpsl
adapt`: they have the global model and their own samples. Accuracy in % on their tests: of the global model, with no
training of their own (the successor then has the device's class prior), and after as many rounds on their own as the
others had with the server.
"""

import argparse
import csv
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from fedcpsl.config import Data, new_config
from fedcpsl.data.federation import Federation
from fedcpsl.data.sources import load_federation
from fedcpsl.data.split import LABELLED, TEST
from fedcpsl.export.adaptation import adapt, rounds_of_a_device
from fedcpsl.export.saved_run import SavedRun, load_saved_run
from fedcpsl.runs.environment import cpu_name, git_commit
from fedcpsl.runs.experiment import build, start

SEEN = 15
ROWS = {
    "fedcpsl2": {"algorithm.name": "fedcpsl2"},
    "fedcpsl2, prior off": {"algorithm.name": "fedcpsl2", "algorithm.prior": "off"},
    "fedcpsl": {"algorithm.name": "fedcpsl", "algorithm.eta": 0.1},
}


def save_samples(federation: Federation, devices: list[int], path: Path) -> None:
    """Write the samples of some devices as a file for `run` or `adapt`; labels that nobody may see are left out."""
    chosen = np.flatnonzero(np.isin(federation.device, devices))
    visible = np.isin(federation.role[chosen], [LABELLED, TEST])
    np.savez(
        path,
        x=federation.x[chosen],
        y=np.where(visible, federation.y[chosen], -1),
        device=federation.device[chosen],
        test=federation.role[chosen] == TEST,
    )


def trained_run(federation: Federation, row: str, seed: int, rounds: int, folder: Path) -> SavedRun:
    save_samples(federation, list(range(SEEN)), folder / "seen.npz")
    given = {"data.dataset": "own", "data.file": str(folder / "seen.npz"), "work.rounds": rounds, "run.seed": seed}
    config = new_config(given | {"run.processes": 1, "run.evaluate_every": rounds} | ROWS[row])
    start(build(config), folder / "run", lambda *_: None)
    return load_saved_run(folder / "run")


def accuracies(row: str, seed: int, rounds: int) -> tuple[float, float, float]:
    """The mean over new devices: the global model, no training, training on their own."""
    federation = load_federation(Data(dataset="digits", devices=20, labelled=0.1), seed=seed)
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), []
        run = trained_run(federation, row, seed, rounds, folder)
        for device in range(SEEN, 20):
            path = folder / f"new{device}.npz"
            save_samples(federation, [device], path)
            data = Data(dataset="own", file=str(path), labelled=1.0)
            untrained, trained = (adapt(run, data, "new", own) for own in (0, rounds_of_a_device(run)))
            found.append((untrained.general, untrained.personal, trained.personal))
    first, second, third = (statistics.mean(each) for each in zip(*found, strict=True))
    return first, second, third


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(
        f"{cpu_name()}, commit {git_commit()}, {date.today().isoformat()}; {chosen.seeds} seeds, {chosen.rounds} rounds"
    )
    lines = []
    for row in ROWS:
        began = time.monotonic()
        found = [accuracies(row, seed, chosen.rounds) for seed in range(chosen.seeds)]
        for case, each in zip(("global model", "no training", "own rounds"), zip(*found, strict=True), strict=True):
            spread = statistics.stdev(each) if len(each) > 1 else 0.0
            lines.append([row, case, f"{statistics.mean(each):.4f}", f"{spread:.4f}", len(each), chosen.rounds])
            print(f"{row:20} {case:14} {100 * statistics.mean(each):6.2f} ± {100 * spread:.2f}", flush=True)
        print(f"{row:20} {time.monotonic() - began:.0f} s", flush=True)
    if chosen.out:
        chosen.out.mkdir(parents=True, exist_ok=True)
        with (chosen.out / "unseen_devices.csv").open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["algorithm", "model", "accuracy", "std_over_seeds", "seeds", "rounds"])
            table.writerows(lines)


if __name__ == "__main__":
    main()
