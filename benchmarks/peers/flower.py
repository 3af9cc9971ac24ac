"""The workload in Flower's simulation (Ray), on a CPU.

    python benchmarks/peers/flower.py --data cifar.npz [--rounds 60] [--actors 2] [--threads 1]

The clients are in flower_client.py; actors keep the images and the model from one client to the next.
"""

import os
import sys
import tempfile
from pathlib import Path

import common
import numpy as np
import torch

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def simulate(chosen, clock: common.Clock, data: common.Images) -> float:
    """The test accuracy after all rounds."""
    from flower_client import app
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    network, tests, found = common.cnn(), common.on_device(data, "cpu"), []
    server = ServerApp()

    def accuracy(arrays: ArrayRecord) -> float:
        network.load_state_dict(arrays.to_torch_state_dict())
        return common.accuracy_of(network.eval(), tests.x_test, tests.y_test)

    def after_round(done: int, arrays: ArrayRecord) -> None:
        if done and common.evaluates(done):
            accuracy(arrays)
        if done:
            clock.round_done()

    @server.main()
    def run(grid, _) -> None:
        fed_avg = FedAvg(
            fraction_train=common.ACTIVE / data.clients,
            fraction_evaluate=0.0,
            min_train_nodes=common.ACTIVE,
            min_available_nodes=data.clients,
        )
        start = ArrayRecord(network.state_dict())
        last = fed_avg.start(grid=grid, initial_arrays=start, num_rounds=chosen.rounds, evaluate_fn=after_round)
        found.append(accuracy(last.arrays))

    resources = {
        "init_args": {"num_cpus": chosen.actors, "num_gpus": 0, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    run_simulation(server_app=server, client_app=app, num_supernodes=data.clients, backend_config=resources)
    return found[0]


def main() -> None:
    options = common.options(__doc__)
    options.add_argument("--actors", type=int, default=1, help="clients side by side")
    chosen = options.parse_args()
    if chosen.device != "cpu":
        sys.exit("flower.py: on a CPU only")
    clock = common.Clock(chosen.rounds, chosen.warmup, common.start_torch(chosen))
    data = common.load(chosen.data, chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "x.npy", data.x)
        np.save(Path(folder) / "y.npy", data.y)
        here = str(Path(__file__).parent)
        paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # for the actors
        told = {"PEERS_FOLDER": folder, "PEERS_THREADS": str(chosen.threads), "FLWR_HOME": folder, "PYTHONPATH": paths}
        os.environ.update(QUIET | told)
        accuracy = simulate(chosen, clock, data)
    import flwr

    common.report(chosen, clock, accuracy, data.clients, flwr=flwr.__version__, torch=torch.__version__)


if __name__ == "__main__":
    main()
