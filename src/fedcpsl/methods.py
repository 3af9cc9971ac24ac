"""From an algorithm's settings and a network to its method and its numbers: all that needs no samples."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedcpsl.algorithm import Algorithm, Method, optional
from fedcpsl.algorithms import find_algorithm
from fedcpsl.engine import Network
from fedcpsl.errors import InputError
from fedcpsl.problem import Costs
from fedcpsl.schedule import Sizes
from fedcpsl.settings import Work
from fedcpsl.trees import Tree

NumberTable = NDArray[np.float64]  # [numbers, devices]


class Resolved(NamedTuple):
    """What an algorithm's settings come to."""

    algorithm: Algorithm
    method: Method  # of the rounds in which the server takes part
    personal_method: Method  # of personal rounds, where there are some

    def for_sizes(self, sizes: Sizes) -> "Resolved":
        """The same with room for a state of each sample, where the algorithm keeps one."""
        most = int(sizes.unlabelled.max(initial=0))
        each = [m._replace(most_unlabelled=most) if m.traits.per_sample else m for m in self[1:]]
        return self._replace(method=each[0], personal_method=each[1])

    def kept_method(self, work: Work) -> Method:
        """The method for what a device keeps: with a personal model if it ever has one."""
        return self.personal_method if work.personal_rounds else self.method


def resolved(settings: Any, network: Network, work: Work, costs: Costs | None = None) -> Resolved:
    """The method of an algorithm with settings that have a step size; InputError where they do not fit together."""
    algorithm, variant = find_algorithm(settings.name)
    if not isinstance(settings, algorithm.Settings):
        name = getattr(algorithm, "__name__", "its file")
        raise InputError(f"algorithm.name = {settings.name!r}: has settings of its own; give {name}.Settings(...)")
    method = Method(network, *algorithm.resolve(variant, settings, costs or Costs()), rounds=work.rounds)
    if work.two_phase and not work.personal_rounds:
        raise InputError("work.two_phase = true: its second phase is personal rounds; give work.personal_rounds too")
    if not work.personal_rounds:
        return Resolved(algorithm, method, method)
    phases = optional(algorithm, "phases")
    if phases is None:
        raise InputError(f"work.personal_rounds = {work.personal_rounds}: {settings.name} has none; give 0")
    return Resolved(algorithm, *phases(method, settings, two_phase=work.two_phase))


def check_recordings(method: Method, recordings: object | None) -> None:
    """Raise InputError if the algorithm draws runs of consecutive samples and nobody knows what is consecutive."""
    if recordings is None and any(draw.of == "runs" for draw in method.traits.draws):
        name = getattr(method.rules, "name", "it")
        raise InputError(
            f"algorithm.name = {name!r}: needs windows in the order of time; give an array `recording` that says which "
            "recording each sample is of"
        )


def numbers_of(algorithm: Algorithm, method: Method, settings: Any, sizes: Sizes) -> tuple[NumberTable, NumberTable]:
    """The fields of `Hyper` for all devices: as they are, and while a device warms up."""
    both = [algorithm.numbers(method, settings, sizes, warming=warming) for warming in (False, True)]
    one, other = (
        np.stack(
            [
                np.broadcast_to(np.asarray(each[name], np.float64), len(sizes.labelled))
                for name in algorithm.Hyper._fields
            ]
        )
        for each in both
    )
    return one, other


def unknown_sizes(devices: int) -> Sizes:
    """As if all devices had one sample: for numbers that do not depend on it."""
    ones = np.ones(devices, np.int64)
    return Sizes(ones, ones)


def hyper_of_device(algorithm: Algorithm, method: Method, settings: Any, devices: int, device: int) -> Tree:
    """The numbers of one device as far as predictions need them, which know nothing of sizes."""
    table, _ = numbers_of(algorithm, method, settings, unknown_sizes(devices))
    return algorithm.Hyper(*torch.from_numpy(table[:, device]).to(method.network.initial))
