"""What does a device get that was not in training? The global model, its class prior, or a model of its own.

    python benchmarks/unseen_devices.py [--seeds 5] [--rounds 100] [--out FOLDER]

Digits on 20 devices of two classes each with a tenth of the labels; 15 train, and 5 come afterwards, as with `fedcpsl
adapt`: they have the global model and their own samples. Accuracy in % on their tests: of the global model, with no
training of their own (the successor then has the device's class prior), and after as many rounds on their own as the
others had with the server.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from seeds import compare, options_for

from fedcpsl.config import Data, new_config
from fedcpsl.data.federation import Federation
from fedcpsl.data.sources import load_federation
from fedcpsl.data.split import LABELLED, TEST
from fedcpsl.export.adaptation import adapt, rounds_of_a_device
from fedcpsl.export.saved_run import SavedRun, load_saved_run
from fedcpsl.runs.experiment import build, start

DATASET = "digits"
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


def accuracies(case: str, row: str, seed: int, rounds: int) -> tuple[float, float, float]:
    """The mean over new devices: training on their own, no training, the global model."""
    assert case == DATASET
    federation = load_federation(Data(dataset=DATASET, devices=20, labelled=0.1), seed=seed)
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), []
        run = trained_run(federation, row, seed, rounds, folder)
        for device in range(SEEN, 20):
            path = folder / f"new{device}.npz"
            save_samples(federation, [device], path)
            data = Data(dataset="own", file=str(path), labelled=1.0)
            untrained, trained = (adapt(run, data, "new", own) for own in (0, rounds_of_a_device(run)))
            found.append((trained.personal, untrained.personal, untrained.general))
    first, second, third = (statistics.mean(each) for each in zip(*found, strict=True))
    return first, second, third


def main() -> None:
    chosen = options_for(__doc__, seeds=5, rounds=100).parse_args()
    measures = ["own rounds", "no training", "global model"]
    compare(chosen, [DATASET], list(ROWS), measures, partial(accuracies, rounds=chosen.rounds))


if __name__ == "__main__":
    main()
