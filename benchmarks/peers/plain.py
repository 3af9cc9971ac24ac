"""The loop that one writes by hand: a copy of the model per client, a fresh SGD, and the mean of the copies.

    python benchmarks/peers/plain.py --data cifar.npz [--rounds 60] [--device cuda] [--precision tf32] [--fused]

All images lie on the device beforehand.
"""

from copy import deepcopy

import common
import numpy as np
import torch


def averaged(network: torch.nn.Module, data: common.Images, clients: list[int], chosen) -> None:
    """One round, in place."""
    total = [torch.zeros_like(p) for p in network.parameters()]
    size = common.IMAGES_OF_CLIENT
    for client in clients:
        copy, rows = deepcopy(network), slice(client * size, (client + 1) * size)
        common.train_one(copy, data.x[rows], data.y[rows], chosen, chosen.fused)
        with torch.no_grad():
            torch._foreach_add_(total, list(copy.parameters()))
    with torch.no_grad():
        for p, summed in zip(network.parameters(), total, strict=True):
            p.copy_(summed / len(clients))


def main() -> None:
    options = common.options(__doc__, "bf16")
    options.add_argument("--fused", action="store_true", help="SGD(fused=True)")
    chosen = options.parse_args()
    clock = common.Clock(chosen.rounds, chosen.warmup, common.start_torch(chosen))
    data = common.on_device(common.load(chosen.data, chosen.seed), chosen.device)
    network = common.cnn().to(chosen.device)
    rng = np.random.default_rng(chosen.seed)

    def accuracy() -> float:
        with common.autocast(chosen):
            return common.accuracy_of(network.eval(), data.x_test, data.y_test)

    for done in range(1, chosen.rounds + 1):
        averaged(network, data, common.cohort(rng, data.clients), chosen)
        if common.evaluates(done):
            accuracy()
        clock.round_done()
    common.report(chosen, clock, accuracy(), data.clients, torch=torch.__version__)


if __name__ == "__main__":
    main()
