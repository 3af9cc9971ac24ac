"""Who is active, how much work each does, which samples it draws and whose upload is lost.

All of it is drawn before a round from streams keyed by (seed, purpose, round, device) and never by the algorithm's
name: compared algorithms meet the same devices and samples, and neither executors nor resuming can change a draw.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fedcpsl.settings import Work as WorkSettings

PURPOSES = (
    "split",
    "init",
    "participation",
    "epochs",
    "labelled",
    "unlabelled",
    "upload",
    "dropout",
    "labels",
    "views",
    "step_size",
    "extra",
    "weights",
    "probed",
    "answers",
    "server",
    "replies",
    "placement",
    "shadowing",
    "clocks",
    "channel",
    "presence",
    "rounding",
    "packets",
    "foreign",
)


def stream(seed: int, purpose: str, *where: int) -> np.random.Generator:
    """The random numbers of one purpose at one place."""
    return np.random.Generator(np.random.Philox(_entropy(seed, purpose, *where)))


def random_bytes(count: int, seed: int, purpose: str, *where: int) -> NDArray[np.uint8]:
    """Random bytes, keyed as `stream` is: for where as many are drawn as a model has parameters."""
    eights = np.random.SFC64(_entropy(seed, purpose, *where)).random_raw(-(-count // 8))
    return eights.astype("<u8", copy=False).view(np.uint8)[:count]


def _entropy(seed: int, purpose: str, *where: int) -> np.random.SeedSequence:
    words = [seed, PURPOSES.index(purpose), *where]
    # the same to NumPy, which looks at a list number by number: half the time
    return np.random.SeedSequence(np.array(words, np.uint32) if 0 <= min(words) <= max(words) < 1 << 32 else words)


@cache
def _key(seed: int, purpose: str) -> tuple[int, int]:
    low, high = np.random.SeedSequence([seed, PURPOSES.index(purpose)]).generate_state(2).tolist()
    return low, high


def philox(
    counter: Sequence[NDArray[np.uint64]] | NDArray[np.uint64], key: tuple[int, int]
) -> list[NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al., 2011), of many counters at once: four words of 32 bits of each, in 64."""
    a, b, c, d = counter
    odd, even = np.array([a, c]), np.array([d, b])  # the two of `even` are swapped all along
    shape = (2, *[1] * (odd.ndim - 1))
    multipliers = MULTIPLIERS.reshape(shape)
    for keys in _round_keys(key, shape):
        products = odd * multipliers
        even ^= products >> HALF
        even ^= keys
        odd, even = even[::-1], np.bitwise_and(products, WORD, products)
    return [odd[0], even[1], odd[1], even[0]]


@cache
def _round_keys(key: tuple[int, int], shape: tuple[int, ...]) -> list[NDArray[np.uint64]]:
    """Both words of the key in each of the ten rounds, the second first."""
    low, high = key
    words = [[(high + i * 0xBB67AE85) & 0xFFFFFFFF, (low + i * 0x9E3779B9) & 0xFFFFFFFF] for i in range(10)]
    return [np.array(each, np.uint64).reshape(shape) for each in words]


MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
HALF, WORD, LOW_BITS = np.uint64(32), np.uint64(0xFFFFFFFF), np.uint64(12)


def uniforms(
    seed: int, purpose: str, round: int | NDArray[np.int64], devices: NDArray[np.int64], count: int = 2
) -> NDArray[np.float64]:
    """Some numbers in (0, 1) for every device, [count, devices], keyed as `stream` is, but of all devices at once.

    A device's numbers depend on nothing but (seed, purpose, round, device): not on which others are asked about.
    `round` may be one for each device.
    """
    pairs = -(-count // 2)
    counter = np.empty((4, pairs, len(devices)), np.uint64)
    counter[0], counter[1], counter[2], counter[3] = devices, 0, round, np.arange(pairs, dtype=np.uint64)[:, None]
    a, b, c, d = philox(counter, _key(seed, purpose))
    words = np.empty((pairs, 2, len(devices)), np.uint64)
    words[:, 0], words[:, 1] = (a << HALF) | b, (c << HALF) | d
    found: NDArray[np.float64] = ((words >> LOW_BITS).astype(np.float64) + 0.5) * 2.0**-52
    return found.reshape(2 * pairs, len(devices))[:count]


def normal(u: NDArray[np.float64], v: NDArray[np.float64]) -> NDArray[np.float64]:
    """sqrt(-2 log u) cos(2 pi v): standard normal, for u and v uniform in (0, 1), by Box and Muller."""
    found: NDArray[np.float64] = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    return found


class Work(NamedTuple):
    """How rounds are drawn: m devices each, their local work, their minibatches."""

    active: int
    unit: str  # "epochs", "steps" or "hlu"
    amount: int  # epochs or steps
    hlu: tuple[int, int]  # the range of epochs
    batch_labelled: int
    batch_unlabelled: int
    loss_rate: float
    matched: bool = False  # an epoch is a pass over all samples, also where the algorithm uses labels alone


def work_of(settings: WorkSettings, active: int, *, alone: bool) -> Work:
    """The settings as far as schedules need them; devices on their own always take as many steps as the others."""
    return Work(
        active=active,
        unit=settings.unit,
        amount=settings.amount,
        hlu=(settings.hlu[0], settings.hlu[1]),
        batch_labelled=settings.batch_labelled,
        batch_unlabelled=settings.batch_unlabelled,
        loss_rate=settings.loss_rate,
        matched=settings.matched_steps or alone,
    )


class Draw(NamedTuple):
    """An extra draw that an algorithm asks for: of which samples, how many, and for each step or once a visit."""

    name: str  # in `Samples.extra`, and in recorded runs
    of: str = "labelled"  # or "unlabelled"; "runs": consecutive unlabelled samples of one recording; or "step": of a
    # visit, one of its steps, after the same share for all; or "devices": of a visit, an order of all others,
    # for `broadcast_each` to choose from
    size: int = 0  # samples; 0: as many as a minibatch has of them
    per_visit: bool = False  # whether it is given to `use_draws` before the first step, in place of a row to each step

    @property
    def for_device(self) -> bool:
        """Whether a device is given it once a visit."""
        return self.per_visit and self.of != "devices"


class Drawn(NamedTuple):
    """What an extra draw gave one device."""

    rows: NDArray[np.int64]  # [steps, size], or [size] of a visit: indices into its samples; none where it has none;
    # or one number, which of its steps, 1 for the first
    keys: NDArray[np.int64] | None = None  # [steps, size]: for dropout


NOTHING_EXTRA: Mapping[str, Drawn] = {}


Recordings = Sequence[NDArray[np.int64]] | Mapping[int, NDArray[np.int64]]


class DeviceRound(NamedTuple):
    """One active device's part of a round."""

    device: int
    steps: int
    labelled: NDArray[np.int64]  # [steps, batch]: indices into its labelled samples; [steps, 0] where it has none
    unlabelled: NDArray[np.int64]  # the same for its unlabelled samples
    lost: bool = False
    relabels: bool = True  # whether its pseudo-labels are renewed before its steps
    warming: bool = False  # whether it uses no pseudo-labels yet
    personal: bool = False  # whether it trains its localized model alone
    keys: NDArray[np.int64] | None = None  # [steps, rows]: for dropout
    views: NDArray[np.int64] | None = None  # [steps, rows + unlabelled rows]: for weak, then strong views of samples
    copies: int = 1  # how often it was drawn: it works once, and its upload counts as often
    extra: Mapping[str, Drawn] = NOTHING_EXTRA  # what the algorithm's own draws gave, by name
    sends: bool = True  # whether it uses the uplink: not where an edge network leaves it no time to
    weight: float = 1.0  # of its update in the general model, beside omega_i: see `fedcpsl.edge.weights`


class Probe(NamedTuple):
    """One device's part of the second exchange of a round."""

    device: int
    drawn: Drawn
    lost: bool = False  # whether its answer is


class Sizes(NamedTuple):
    """How many labelled and unlabelled samples each device holds."""

    labelled: NDArray[np.int64]
    unlabelled: NDArray[np.int64]


def omega(sizes: Sizes, roster: NDArray[np.int64], devices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.float64]:
    """omega_i = (n_i + m_i) / sum_j (n_j + m_j): what a device weighs among those that have joined."""
    samples = sizes.labelled + sizes.unlabelled
    weights: NDArray[np.float64] = samples[np.asarray(devices, np.int64)] / samples[roster].sum()
    return weights


def steps_per_epoch(n: int, m: int, work: Work, unlabelled: bool) -> int:
    """ceil(max(n_i/B_l, m_i/B_u)): one pass over the data that the algorithm uses."""
    passes = [n / work.batch_labelled, m / work.batch_unlabelled if unlabelled else 0]
    return ceil(max(passes))


def draw_active(seed: int, round: int, roster: Sequence[int] | NDArray[np.int64], active: int) -> list[int]:
    """m devices uniformly without replacement; a larger m adds devices to the same ones."""
    return sorted(draw_roster_order(seed, round, roster)[:active].tolist())


def draw_roster_order(seed: int, round: int, roster: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """All devices of the roster in the order in which a round draws them."""
    return stream(seed, "participation", round).permutation(np.asarray(roster))


def draw_numbers(seed: int, round: int, count: int, skip: int = 0) -> NDArray[np.float64]:
    """Numbers in [0, 1) that draw devices by weight, after the first `skip`; a larger count adds to the same ones."""
    return stream(seed, "weights", round).random(skip + count)[skip:]


def draw_by_weight(weights: NDArray[Any], numbers: NDArray[np.float64]) -> dict[int, int]:
    """Devices, in ascending order, and how often each was drawn: a number u draws the least i with c_i > u c_N.

    c_i is the sum of the weights up to that of device i. Nobody is drawn where no weight is positive.
    """
    sums = np.cumsum(weights, dtype=np.float64)
    if not (len(sums) and sums[-1] > 0):
        return {}
    last = np.searchsorted(sums, sums[-1])  # rounding may make u c_N as large as c_N
    drawn = np.minimum(np.searchsorted(sums, numbers * sums[-1], side="right"), last)
    devices, copies = np.unique(drawn, return_counts=True)
    return dict(zip(devices.tolist(), copies.tolist(), strict=True))


def draw_order(seed: int, purpose: str, count: int, *where: int) -> NDArray[np.int64]:
    """An order of samples: of those that the server holds in a round, or of a device's labelled ones after it."""
    return stream(seed, purpose, *where).permutation(count)


def draw_steps(seed: int, round: int, device: int, sizes: Sizes, work: Work, unlabelled: bool) -> int:
    """Q_i^r: from epochs, given steps, or epochs drawn uniformly for heterogeneous local updates (HLU)."""
    n, m = int(sizes.labelled[device]), int(sizes.unlabelled[device])
    if n == 0 and not (unlabelled and m):
        return 0  # no data that the algorithm uses
    epoch = steps_per_epoch(n, m, work, unlabelled or work.matched)
    if work.unit == "steps":
        return work.amount
    if work.unit == "hlu":
        low, high = work.hlu
        return epoch * int(stream(seed, "epochs", round, device).integers(low, high + 1))
    return epoch * work.amount


def draw_tasks(
    seed: int,
    round: int,
    devices: Sequence[int],
    sizes: Sizes,
    work: Work,
    *,
    unlabelled: bool,
    dropout: bool,
    views: bool = False,
    extra: Sequence[Draw] = (),
    recordings: Recordings | None = None,
) -> list[DeviceRound]:
    """What given devices do in a round: their steps and samples, and whose upload is lost."""
    plan = []
    for device in devices:
        steps = draw_steps(seed, round, device, sizes, work, unlabelled)
        widths = work.batch_labelled, work.batch_unlabelled if unlabelled else 0
        labelled = _draw_batches(seed, "labelled", round, device, steps, widths[0], sizes.labelled)
        others = _draw_batches(seed, "unlabelled", round, device, steps, widths[1], sizes.unlabelled)
        lost = work.loss_rate > 0 and bool(stream(seed, "upload", round, device).random() < work.loss_rate)
        keys = draw_keys(seed, "dropout", round, device, steps, widths) if dropout else None
        of_views = draw_keys(seed, "views", round, device, steps, (*widths, widths[1])) if views else None
        own = {
            draw.name: draw_extra(draw, seed, round, device, steps, sizes, work, recordings, dropout=dropout)
            for draw in extra
        }
        plan.append(DeviceRound(device, steps, labelled, others, lost, keys=keys, views=of_views, extra=own))
    return plan


def with_steps(task: DeviceRound, steps: int, extra: Sequence[Draw], again: Callable[[Draw], Drawn]) -> DeviceRound:
    """A device's part of a round with fewer steps, the first of those drawn; `again` draws what depends on how many."""
    if steps == task.steps:
        return task

    def cut(rows: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        return None if rows is None else rows[:steps]

    own = {
        draw.name: again(draw)
        if draw.of == "step"
        else drawn
        if draw.per_visit
        else Drawn(drawn.rows[:steps], cut(drawn.keys))
        for draw in extra
        if (drawn := task.extra[draw.name])
    }
    return task._replace(
        steps=steps,
        labelled=task.labelled[:steps],
        unlabelled=task.unlabelled[:steps],
        keys=cut(task.keys),
        views=cut(task.views),
        extra=own,
    )


def draw_extra(
    draw: Draw,
    seed: int,
    round: int,
    device: int,
    steps: int,
    sizes: Sizes,
    work: Work,
    recordings: Recordings | None = None,
    *,
    dropout: bool = False,
) -> Drawn:
    """One device's part of an extra draw, from a stream of the draw's own name: other draws do not shift it.

    `recordings` has the lengths of every device's recordings, for runs.
    """
    if draw.of == "devices":
        order = stream(seed, "extra", round, device, crc32(draw.name.encode())).permutation(len(sizes.labelled))
        return Drawn(order[order != device])
    if draw.of == "step":
        share = 1 - stream(seed, "extra", round, crc32(draw.name.encode())).random()  # in (0, 1], of all devices
        return Drawn(np.array(ceil(share * steps)))
    shape, place = draw_shape(draw, steps, work), (round, device, crc32(draw.name.encode()))
    starts = run_starts(recordings[device] if recordings else NO_RECORDINGS, draw.size) if draw.of == "runs" else None
    counts = sizes.labelled if draw.of == "labelled" else sizes.unlabelled
    count = int(counts[device]) if starts is None else len(starts)
    if count == 0:
        return Drawn(np.empty((*shape[:-1], 0), np.int64))
    keys = stream(seed, "dropout", *place).integers(0, 2**62, shape) if dropout and not draw.per_visit else None
    if starts is None:
        return Drawn(stream(seed, "extra", *place).integers(0, count, shape), keys)
    return Drawn(runs_from(starts[stream(seed, "extra", *place).integers(0, count, shape[:-1])], draw.size), keys)


NO_RECORDINGS = np.empty(0, np.int64)


def run_starts(lengths: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Where a run of consecutive samples of one recording can begin, given the lengths of recordings in their order."""
    firsts = lengths.cumsum() - lengths
    pieces = [np.arange(first, first + n - size + 1) for first, n in zip(firsts, lengths, strict=True) if n >= size]
    return np.concatenate([np.empty(0, np.int64), *pieces])


def runs_from(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The samples of runs that begin at given ones, [..., size]; none where there are no runs."""
    return starts[..., None] + np.arange(size)


def draw_probes(
    draw: Draw, seed: int, round: int, roster: Sequence[int] | NDArray[np.int64], sizes: Sizes, work: Work
) -> list[Probe]:
    """Who is asked in the second exchange of a round, m devices uniformly, about which samples, and what is lost."""
    order = stream(seed, "probed", round).permutation(np.asarray(roster))
    found = []
    for device in sorted(order[: work.active].tolist()):
        lost = work.loss_rate > 0 and bool(stream(seed, "answers", round, device).random() < work.loss_rate)
        found.append(Probe(device, draw_extra(draw, seed, round, device, 1, sizes, work), lost))
    return found


def draw_shape(draw: Draw, steps: int, work: Work) -> tuple[int, ...]:
    """The shape of what an extra draw gives a device that has such samples."""
    size = draw.size or (work.batch_labelled if draw.of == "labelled" else work.batch_unlabelled)
    return (size,) if draw.per_visit else (steps, size)


def draw_keys(seed: int, purpose: str, round: int, device: int, steps: int, widths: Sequence[int]) -> NDArray[np.int64]:
    """A key per step and row, labelled rows first; each kind's keys do not depend on the others'."""
    kinds = [
        stream(seed, purpose, round, device, kind).integers(0, 2**62, (steps, width))
        for kind, width in enumerate(widths)
        if width
    ]
    return np.concatenate(kinds, 1)


def _draw_batches(
    seed: int, purpose: str, round: int, device: int, steps: int, batch: int, counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    if counts[device] == 0:
        return np.empty((steps, 0), np.int64)
    return stream(seed, purpose, round, device).integers(0, counts[device], (steps, batch))
