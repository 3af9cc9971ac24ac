"""The workload in fedcpsl.

    python benchmarks/peers/fedcpsl_run.py --data cifar.npz [--rounds 60] [--device cuda] [--precision tf32]
        [--executor vectorised] [--processes 2]

Where it differs from the others: a round's 50 clients are drawn without replacement, and a client's five minibatches
of 10 are drawn from its 50 images anew, instead of being an epoch's five pieces. The amount of work is the same.
"""

import common
import numpy as np
import torch

from fedcpsl import Algorithm, Federation, Run, Work, prepare, simulate


def federation(data: common.Images) -> Federation:
    """Every client with its 50 labelled images; the test images are dealt out evenly, but scored together."""
    x, y = np.concatenate([data.x, data.x_test]), np.concatenate([data.y, data.y_test])
    owner = np.arange(len(data.y)) // common.IMAGES_OF_CLIENT
    owner = np.concatenate([owner, np.arange(len(data.y_test)) % data.clients])
    return Federation.from_arrays(x, y, owner, np.arange(len(y)) >= len(data.y), normalise=False)


def main() -> None:
    options = common.options(__doc__, "bf16")
    options.add_argument("--executor", choices=["auto", "sequential", "vectorised"], default="auto")
    options.add_argument("--processes", type=int, default=0, help="0: fedcpsl's own choice")
    chosen = options.parse_args()
    clock = common.Clock(chosen.rounds, chosen.warmup, common.start_torch(chosen))
    data = common.load(chosen.data, chosen.seed)
    setup = prepare(
        federation(data),
        common.cnn(),
        Algorithm(name="fedavg", eta=common.ETA),
        Work(rounds=chosen.rounds, active=common.ACTIVE, unit="epochs", amount=1, batch_labelled=common.BATCH),
        Run(
            seed=chosen.seed,
            device=chosen.device,
            executor=chosen.executor,
            processes=chosen.processes or "auto",
            precision=chosen.precision,
        ),
    )

    def accuracy(theta: torch.Tensor) -> float:
        network, tests = setup.terms.method.network, setup.data.test
        return common.accuracy_of(lambda x: network.log_probabilities(theta, x), tests.x, tests.y)

    for state in simulate(setup):
        if state.round == 0:
            continue
        if common.evaluates(state.round):
            accuracy(state.server.theta)
        clock.round_done()
    chosen.executor, chosen.processes = setup.machine.executor, setup.machine.processes
    common.report(chosen, clock, accuracy(state.server.theta), data.clients, torch=torch.__version__)


if __name__ == "__main__":
    main()
