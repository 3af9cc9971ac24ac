"""The workload that every script here runs, and how it is timed.

It is pfl-research's CIFAR-10 benchmark with i.i.d. clients: FedAvg over 1000 clients of 50 images, 50 of them in a
round, one local epoch in batches of 10 by SGD with step size 0.1, the plain mean of the clients' models, no
augmentation, a CNN of 1,626,442 parameters, and the accuracy on the 10,000 test images every 10 rounds. pfl's
benchmark also evaluates every client before and after its training in some rounds; nobody does so here.

Only NumPy is imported at once: FedJAX's environment has no PyTorch.
"""

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

IMAGES_OF_CLIENT = 50
ACTIVE = 50
BATCH = 10
ETA = 0.1
PARAMETERS = 1_626_442
EVALUATE_EVERY = 10
EVALUATION_BATCH = {"cuda": 10_000, "cpu": 250}  # pfl's benchmark has 10,000; caches of a CPU want fewer


def flop_per_round() -> int:
    """Forward, and backward without the first layer's input gradient, of one round's local steps."""
    first = 2 * 30 * 30 * (3 * 9) * 32
    forward = first + 2 * 28 * 28 * (32 * 9) * 64 + 2 * 14 * 14 * 64 * 128 + 2 * 128 * 10
    return ACTIVE * IMAGES_OF_CLIENT * (3 * forward - first)


def options(description: str | None, *precisions: str) -> argparse.ArgumentParser:
    """What every script can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="an .npz with x, y, x_test, y_test: bytes, channels first")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5, help="first rounds, which are not timed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="on a CPU, in each process; 0: the library's own choice")
    parser.add_argument("--precision", choices=["ieee", "tf32", *precisions], default="ieee", help="on a GPU")
    return parser


class Images(NamedTuple):
    """CIFAR-10, float32, [samples, channel, y, x], each channel normalised by the training images."""

    x: np.ndarray  # 50 consecutive ones are a client's
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def clients(self) -> int:
        return len(self.x) // IMAGES_OF_CLIENT

    def channels_last(self) -> "Images":
        x, x_test = (np.ascontiguousarray(images.transpose(0, 2, 3, 1)) for images in (self.x, self.x_test))
        return self._replace(x=x, x_test=x_test)


def load(path: str, seed: int) -> Images:
    """The images, dealt to clients at random."""
    with np.load(path) as found:
        x, y, x_test, y_test = (found[name] for name in ("x", "y", "x_test", "y_test"))
    order = np.random.default_rng(seed).permutation(len(x))
    order = order[: len(x) // IMAGES_OF_CLIENT * IMAGES_OF_CLIENT]
    tables = [_normalised_bytes(x[:, channel]) for channel in range(3)]
    x, x_test = (np.stack([tables[c][images[:, c]] for c in range(3)], 1) for images in (x[order], x_test))
    return Images(x, y[order].astype(np.int64), x_test, y_test.astype(np.int64))


def _normalised_bytes(channel: np.ndarray) -> np.ndarray:
    """What each of the 256 values becomes, so that the channel has mean 0 and deviation 1."""
    values, counts = np.arange(256), np.bincount(channel.reshape(-1), minlength=256)
    mean = np.average(values, weights=counts)
    deviation = np.sqrt(np.average((values - mean) ** 2, weights=counts))
    return ((values - mean) / deviation).astype(np.float32)


def cohort(rng: np.random.Generator, clients: int) -> list[int]:
    """A round's clients: uniformly, with replacement, as pfl draws them."""
    return rng.integers(0, clients, ACTIVE).tolist()


class Clock:
    """Wall time round by round. The device is waited for at the two ends of the timed span and nowhere else."""

    def __init__(self, rounds: int, warmup: int, wait: Callable[[], object] = lambda: None) -> None:
        if not 1 <= warmup < rounds:
            raise SystemExit("--warmup: at least 1, and fewer than --rounds")
        self.rounds, self.warmup, self.wait = rounds, warmup, wait
        self.ends: list[float] = []

    def round_done(self) -> None:
        """To be called after every round, and after its evaluation where it has one."""
        if len(self.ends) + 1 in (self.warmup, self.rounds):
            self.wait()
        self.ends.append(time.perf_counter())

    def milliseconds(self) -> dict[str, float]:
        timed = 1000 * np.diff(self.ends[self.warmup - 1 :])
        return {"mean_ms": round(float(timed.mean()), 3), "median_ms": round(float(np.median(timed)), 3)}


def evaluates(done: int) -> bool:
    """Whether the test images are due after so many rounds: 1 (which is never timed), 11, 21, ..., as in pfl."""
    return (done - 1) % EVALUATE_EVERY == 0


def report(chosen: argparse.Namespace, clock: Clock, accuracy: float, clients: int, **versions: str) -> None:
    """The result, as one line of JSON."""
    asked = {name: value for name, value in vars(chosen).items() if name != "data"}
    result = clock.milliseconds() | {"accuracy": round(float(accuracy), 4), "clients": clients}
    print(json.dumps(asked | result | {"versions": versions}), flush=True)


# What the scripts that use PyTorch share.


def start_torch(chosen: argparse.Namespace) -> Callable[[], object]:
    """Settings, seed, and what waits for the device."""
    import torch

    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.backends.cuda.matmul.allow_tf32 = chosen.precision != "ieee"
    torch.backends.cudnn.allow_tf32 = chosen.precision != "ieee"
    torch.manual_seed(chosen.seed)
    return torch.cuda.synchronize if chosen.device == "cuda" else lambda: None


def autocast(chosen: argparse.Namespace) -> AbstractContextManager[Any]:
    import torch

    return torch.autocast(chosen.device, torch.bfloat16) if chosen.precision == "bf16" else nullcontext()


def on_device(images: Images, device: str) -> Any:
    """The same with tensors in the place of arrays."""
    import torch

    return Images(*(torch.from_numpy(array).to(device) for array in images))


def cnn(*, channels_last: bool = False) -> Any:
    """pfl-research's CNN, and its initialisation; with `channels_last` it turns its input round first, as theirs."""
    from torch import nn

    class ChannelsFirst(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.permute(0, 3, 1, 2)

    layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)]
    layers += [nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)]
    for layer in layers:
        if hasattr(layer, "weight"):
            nn.init.xavier_uniform_(layer.weight)
    network = nn.Sequential(*([ChannelsFirst()] if channels_last else []), *layers)
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS
    return network


def accuracy_of(predict: Callable[[Any], Any], x: Any, y: Any) -> float:
    """The share of images whose class has the largest output."""
    import torch

    with torch.no_grad():
        size = EVALUATION_BATCH[x.device.type]
        pairs = zip(x.split(size), y.split(size), strict=True)
        right = [(predict(some).argmax(-1) == of).sum() for some, of in pairs]
        return int(sum(right)) / len(y)


def train_one(network: Any, x: Any, y: Any, chosen: argparse.Namespace, fused: bool = False) -> None:
    """A client's local epoch, as a PyTorch tutorial would write it."""
    import torch

    network.train()
    optimiser = torch.optim.SGD(network.parameters(), ETA, fused=fused or None)
    for some, of in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimiser.zero_grad()
        with autocast(chosen):
            cost = torch.nn.functional.cross_entropy(network(some), of)
        cost.backward()
        optimiser.step()
