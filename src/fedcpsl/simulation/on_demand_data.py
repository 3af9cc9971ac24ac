"""Device data with the samples of a round's devices only, made before the round; and the devices that are tested."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.roles import TEST, VALIDATION
from fedcpsl.settings import AUTO
from fedcpsl.simulation.device_data import DeviceData, Inputs, hold, place_samples
from fedcpsl.simulation.store import Map, put_rows, shared_memory, shared_zeros

TESTED = 100  # devices, where samples are made on demand


def device_data_of(
    federation: Federation | OnDemand,
    device: torch.device,
    dtype: torch.dtype,
    beside: DeviceData | None,
    active: int,
    evaluate_devices: int | str,
) -> DeviceData:
    """All samples of a federation in memory; or room for those of so many active devices, and some devices' tests."""
    count = choose_tested_count(evaluate_devices, federation) or federation.devices
    tested = np.linspace(0, federation.devices - 1, count).round().astype(np.int64)  # evenly spread
    if isinstance(federation, Federation):
        return place_samples(federation, device, dtype, beside, tested)
    return _empty_shelf(federation, device, dtype, active, tested)


def choose_tested_count(given: int | str, federation: Federation | OnDemand) -> int:
    """How many devices are tested; 0: all."""
    count = (TESTED if isinstance(federation, OnDemand) else 0) if given == AUTO else int(given)
    return count if count < federation.devices else 0


def _empty_shelf(
    supply: OnDemand, device: torch.device, dtype: torch.dtype, active: int, tested: NDArray[np.int64]
) -> DeviceData:
    """Buffers that hold any so many devices; forked processes share what a round writes into."""
    sizes = supply.sizes
    rows = max(2, int(np.sort(sizes.labelled + sizes.unlabelled)[-active:].sum()))

    def room(*shape: int, of: torch.dtype = dtype) -> Tensor:
        zeros = shared_zeros(shape, of)
        return zeros if device.type == "cpu" else zeros.to(device)

    start = np.frombuffer(shared_memory(8 * supply.devices), np.int64)
    held = supply.held(tested.tolist())
    tests = Inputs(torch.from_numpy(np.asarray(held.x)).to(dtype).to(device), held.x, None)
    return DeviceData(
        inputs=Inputs(room(rows, *supply.shape), np.empty(0), None),
        source=torch.arange(rows, device=device),
        one_hot=room(rows, supply.classes),
        truth=room(rows, of=torch.int64),
        hidden=room(rows, of=torch.bool),
        device=room(rows, of=torch.int64),
        start=start,
        labelled=sizes.labelled,
        unlabelled=sizes.unlabelled,
        test=hold(held, tests, TEST, tested, supply.devices),
        validation=hold(held, tests, VALIDATION, tested, supply.devices),
    )


def stock(
    device_data: DeviceData,
    supply: OnDemand,
    targets: Tensor,
    nu: Tensor,
    there: NDArray[np.bool_],
    which: Sequence[int],
) -> None:
    """Make the samples of some devices and put them in their place, with the pseudo-labels that they had."""
    if not which:
        return
    samples = [supply.samples(device) for device in which]
    n, m = device_data.labelled[list(which)], device_data.unlabelled[list(which)]
    x = np.concatenate([each.x[:k] for each, k in zip(samples, n + m, strict=True)])
    y = np.concatenate([each.y[:k] for each, k in zip(samples, n + m, strict=True)])
    begin = np.concatenate([[0], (n + m).cumsum()])
    device_data.start[list(which)] = begin[:-1]
    hidden = np.arange(len(y)) - np.repeat(begin[:-1], n + m) >= np.repeat(n, n + m)
    target = np.where(hidden[:, None], 1 / supply.classes, np.eye(supply.classes)[np.maximum(y, 0)])
    filled = slice(0, len(y))
    device_data.hidden[len(y) :] = False
    for buffer, values in (
        (device_data.inputs.raw, x),
        (device_data.truth, y),
        (device_data.hidden, hidden),
        (device_data.device, np.repeat(np.asarray(which), n + m)),
        (targets, target),
    ):
        buffer[filled].copy_(torch.from_numpy(values).to(buffer.dtype))
    known = [device for device in which if there[device]]
    if nu.numel() and known:
        place, real = _places(device_data, known, nu.shape[1], targets.device)
        had = nu[torch.tensor(known, device=nu.device)].to(targets.device)
        targets.index_copy_(0, place, had.flatten(0, 1).index_select(0, real))


def put_back(device_data: DeviceData, targets: Tensor, nu: Tensor, behind: Map | None, which: Sequence[int]) -> None:
    """Keep the pseudo-labels of devices whose samples are there until they are active again."""
    if not nu.numel() or not which:
        return
    place, real = _places(device_data, which, nu.shape[1], targets.device)
    kept = targets.new_zeros(len(which), *nu.shape[1:])
    kept.flatten(0, 1).index_copy_(0, real, targets.index_select(0, place))
    put_rows(nu, behind, which, kept)


def _places(device_data: DeviceData, which: Sequence[int], most: int, where: torch.device) -> tuple[Tensor, Tensor]:
    """Where the unlabelled samples of some devices are, and among rows of `most` for each device."""
    chosen = list(which)
    column = np.arange(most)
    real = column < device_data.unlabelled[chosen][:, None]
    place = (device_data.start[chosen] + device_data.labelled[chosen])[:, None] + column
    return torch.from_numpy(place[real]).to(where), torch.from_numpy(np.flatnonzero(real)).to(where)
