"""FedCPSL's local steps on CIFAR-10's CNN on a CPU, beside a loop that one writes by hand in plain PyTorch.

    python benchmarks/cifar_cpu.py [--turns 5] [--steps 16] [--out FILE]

Both train two devices with the paper's CNN, two models each, on minibatches of 32 labelled and 32 unlabelled images
(random ones: their values do not matter here). The plain loop has two modules per device in channels-last order,
autograd, momentum, control variates and the mixture's cost, and uses the cores in the way that is best for it: one
process with all threads, or a process per device. Ours is what `fedcpsl run` does. They take turns, and so does the
matmul rate; a turn counts its better half, and the ratio is of the turns' medians.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from math import log
from pathlib import Path
from statistics import median

import numpy as np
import torch
from mnist_cpu import about, matmul_rate
from torch import Tensor, nn

from fedcpsl import Algorithm, Federation, Run, Work, prepare
from fedcpsl.models import cnn
from fedcpsl.simulation import tuning

DEVICES, BATCH = 2, 64
ETA, ETA_LC, GAMMA, BETA, ALPHA_P, ALPHA_R = 0.002, 0.004, 0.8, 0.75, 0.03, 0.01


def flop_per_step() -> int:
    """Forward, and backward without the first layer's input gradient, of both models on one minibatch."""
    first = 2 * 28 * 28 * (3 * 25) * 32
    forward = first + 2 * 10 * 10 * (32 * 25) * 64 + 2 * 1600 * 512 + 2 * 512 * 10
    return 2 * BATCH * (3 * forward - first)


class Plain:
    """One device's round in plain PyTorch."""

    def __init__(self) -> None:
        self.models = [cnn((3, 32, 32), 10).to(memory_format=torch.channels_last) for _ in range(2)]
        self.momenta = [[torch.zeros_like(p) for p in model.parameters()] for model in self.models]
        self.correction = [torch.zeros_like(p) for p in self.models[0].parameters()]
        self.x = torch.randn(8, BATCH, 3, 32, 32)
        self.target = torch.softmax(torch.randn(8, BATCH, 10), -1)
        half = torch.arange(BATCH) < BATCH // 2
        self.loss = torch.where(half, 1.0, ALPHA_P) / (BATCH // 2)
        self.regulariser = torch.where(half, 0.0, ALPHA_R) / (BATCH // 2)

    def cost(self, log_h: Tensor, target: Tensor) -> Tensor:
        loss = -(target * log_h).sum(-1)
        regulariser = (log_h.exp() * log_h).sum(-1) + (target * target.log()).sum(-1) + 2 * log(10)
        return (self.loss * loss + self.regulariser * regulariser).sum()

    def step(self, t: int) -> None:
        x = self.x[t % 8].contiguous(memory_format=torch.channels_last)
        target = self.target[t % 8]
        general, localized = (torch.log_softmax(model(x), -1) for model in self.models)
        mixed = torch.logaddexp(localized + log(BETA), general.detach() + log(1 - BETA))
        (self.cost(general, target) + self.cost(mixed, target)).backward()
        for model, mu, eta in zip(self.models, self.momenta, (ETA, ETA_LC), strict=True):
            self.update(model, mu, eta, corrected=mu is self.momenta[0])

    @torch.no_grad()
    def update(self, model: nn.Module, mu: list[Tensor], eta: float, *, corrected: bool) -> None:
        parameters = list(model.parameters())
        torch._foreach_mul_(mu, GAMMA)
        if corrected:
            torch._foreach_add_(mu, self.correction)
        torch._foreach_add_(mu, [p.grad for p in parameters])
        torch._foreach_add_(parameters, mu, alpha=-eta)
        model.zero_grad()


def plain_in_threads(steps: int) -> float:
    """Seconds per device-step, one device after another with all threads."""
    devices = [Plain() for _ in range(DEVICES)]
    return min(_timed([device.step for device in devices], steps) for _ in range(2)) / DEVICES


def plain_in_processes(steps: int) -> float:
    """Seconds per device-step, a process with one thread for each device."""
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(DEVICES), context.SimpleQueue()

    def work() -> None:
        torch.set_num_threads(1)
        device = Plain()
        device.step(0)
        start.wait()
        results.put(min(_timed([device.step], steps) for _ in range(2)))

    workers = [context.Process(target=work) for _ in range(DEVICES)]
    for worker in workers:
        worker.start()
    slowest = max(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    return slowest / DEVICES


def _timed(each: list[Callable[[int], None]], steps: int) -> float:
    for step in each:
        step(0)
    began = time.perf_counter()
    for t in range(steps):
        for step in each:
            step(t)
    return (time.perf_counter() - began) / steps


def ours(processes: int | str) -> Callable[[int], float]:
    rng = np.random.default_rng(0)
    count = DEVICES * 400
    x, y = rng.normal(size=(count, 3, 32, 32)).astype(np.float32), rng.integers(0, 10, count)
    owner, unlabelled = np.arange(count) % DEVICES, np.arange(count) % 4 > 0
    federation = Federation.from_arrays(x, np.where(unlabelled, -1, y), owner, normalise=False)
    algorithm = Algorithm(eta=ETA, gamma=GAMMA, beta=BETA, alpha_p=ALPHA_P, alpha_r=ALPHA_R)
    setup = prepare(federation, cnn((3, 32, 32), 10), algorithm, Work(active=DEVICES), Run(processes=processes))
    layout = tuning.Layout(setup.machine.executor, setup.machine.slots, setup.machine.processes)

    def measure(steps: int) -> float:
        return min(1 / tuning.device_steps_per_second(setup, layout, steps * 0.15) for _ in range(2))

    return measure


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--steps", type=int, default=16, help="of each device in a turn")
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    ways: dict[str, Callable[[int], float]] = {
        "fedcpsl": ours("auto"),
        "plain, all threads": plain_in_threads,
        "plain, a process per device": plain_in_processes,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    rates = [matmul_rate()]
    for _ in range(chosen.turns):
        for name, way in ways.items():
            seconds[name].append(way(chosen.steps))
        rates.append(matmul_rate())
    middle = {name: median(each) for name, each in seconds.items()}
    best_plain = min(value for name, value in middle.items() if name != "fedcpsl")
    shares = {name: flop_per_step() / value / median(rates) for name, value in middle.items()}
    for name, value in middle.items():
        print(f"{name:<28} {1e3 * value:7.1f} ms a device-step, {100 * shares[name]:5.1f} % of the matmul rate")
    print(f"fedcpsl is {best_plain / middle['fedcpsl']:.2f} times as fast; matmul {median(rates) / 1e9:.1f} GFLOP/s")
    if chosen.out:
        result = about() | {
            "milliseconds": {name: [round(1e3 * s, 2) for s in each] for name, each in seconds.items()},
            "share": {name: round(share, 3) for name, share in shares.items()},
            "times_as_fast": round(best_plain / middle["fedcpsl"], 3),
        }
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
