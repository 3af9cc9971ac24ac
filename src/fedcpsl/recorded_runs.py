"""Replaying test vectors: small recorded runs in float64, with every random choice as an input."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcpsl import config
from fedcpsl.algorithm import optional
from fedcpsl.data.federation import Federation
from fedcpsl.data.readers import read_archive
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED
from fedcpsl.errors import InputError
from fedcpsl.evaluation import own_models, predict
from fedcpsl.schedule import DeviceRound, Draw, Drawn, Probe, draw_by_weight, runs_from
from fedcpsl.simulation import Setup, State, initial_state, prepare
from fedcpsl.simulation.rounds import next_state
from fedcpsl.theory import applies, objectives
from fedcpsl.trees import named_leaves
from fedcpsl.views import Views

RELATIVE, ABSOLUTE = 1e-9, 1e-11
Vector = dict[str, Any]


class Difference(NamedTuple):
    """One compared quantity: `error` is relative to the tolerance, so above 1 is a failure."""

    quantity: str
    round: int
    device: int | None
    error: float
    largest: float  # the largest absolute difference

    def __str__(self) -> str:
        where = f"round {self.round}" + ("" if self.device is None else f", device {self.device}")
        return f"{where}: {self.quantity} differs by {self.largest:.3g}"


def executors() -> list[tuple[str, str]]:
    """Return every (executor, device) that this machine can run in float64."""
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    return [(executor, device) for device in devices for executor in ("sequential", "vectorised")]


def read_vector(path: Path) -> Vector:
    """Read a vector file: its arrays, and `meta` as a dictionary."""
    vector: Vector = dict(read_archive(path))
    try:
        vector["meta"] = json.loads(str(vector["meta"]))
    except (KeyError, ValueError) as error:
        raise InputError(f"{path}: not a test vector: `meta` is missing or not JSON") from error
    return vector


def replay(vector: Vector, executor: str, device: str = "cpu") -> Iterator[Difference]:
    """Run the recorded schedule and yield the difference of every recorded output, in order of rounds."""
    try:
        rounds = vector["meta"]["rounds"]
        setup, views = _with_recorded_views(vector, _setup(vector, executor, device))
        state = _with_recorded_start(vector, initial_state(setup))
        yield from _compare(vector, state)
        for r in range(rounds):
            yield from _compare_draw(vector, state)
            traits = setup.terms.method.traits
            plan = _plan(vector, r, traits.draws)
            probes = _probes(vector, r, traits.probe) if traits.probe else None
            plan = [task._replace(views=views.get((r, task.device))) for task in plan]
            state = next_state(state, plan, probes=probes)
            yield from _compare(vector, state)
        yield from _compare_predictions(vector, state)
        yield from _not_compared(vector, state)
    except KeyError as error:
        raise InputError(f"not a test vector: {error} is missing") from error


def vector_network(sizes: list[int], activation: str) -> nn.Sequential:
    """Return a network whose layer k is named k; an activation follows every layer but the last."""
    kinds = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "gelu": nn.GELU}
    network = nn.Sequential()
    for k, (a, b) in enumerate(pairwise(sizes)):
        network.add_module(str(k), nn.Linear(a, b))
        if k < len(sizes) - 2:
            network.add_module(f"activation{k}", kinds[activation]())
    return network


def _setup(vector: Vector, executor: str, device: str) -> Setup:
    meta = vector["meta"]
    model = vector_network(meta["sizes"], meta["activation"]).double()
    model.load_state_dict({k: torch.from_numpy(vector[f"in/init/{k}"]) for k in model.state_dict()})
    return prepare(
        _federation(vector),
        model,
        _settings(meta),
        config.Work(
            rounds=meta["rounds"],
            active=meta["active"],
            batch_labelled=meta["batch_l"],
            batch_unlabelled=meta["batch_u"],
        ),
        config.Run(executor=executor, device=device, dtype="float64", processes=1),
    )


def _settings(meta: Mapping[str, Any]) -> Any:
    """Return the algorithm's settings from `meta`, which has their names."""
    kind = config.algorithm_settings(meta["algorithm"])
    given = {f.name: meta[f.name] for f in fields(kind) if f.name in meta}
    return kind(**given | {"name": meta["algorithm"]})


def _federation(vector: Vector) -> Federation:
    devices = vector["meta"]["devices"]
    pieces = [
        (i, role, vector[f"in/device{i}/{name}"] if name != "x_t" else _tests(vector, i))
        for i in range(devices)
        for role, name in ((LABELLED, "x_l"), (UNLABELLED, "x_u"), (TEST, "x_t"))
    ]
    labels = [
        vector[f"in/device{i}/y_l"] if role == LABELLED else np.full(len(x), -1, np.int64) for i, role, x in pieces
    ]
    return Federation(
        x=np.concatenate([x for _, _, x in pieces]),
        y=np.concatenate(labels).astype(np.int64),
        device=np.concatenate([np.full(len(x), i) for i, _, x in pieces]),
        role=np.concatenate([np.full(len(x), role, np.int8) for _, role, x in pieces]),
        classes=vector["meta"]["sizes"][-1],
        names=tuple(str(i) for i in range(devices)),
        recording=np.concatenate([np.full(len(x), i) for i, _, x in pieces]),
    )


def _tests(vector: Vector, device: int) -> NDArray[Any]:
    """Return the inputs of a device's recorded predictions: its own, or the same for all devices."""
    own = f"in/device{device}/x_t"
    found: NDArray[Any] = vector[own if own in vector else "in/test/x"]
    return found


def _plan(vector: Vector, r: int, draws: Sequence[Draw]) -> list[DeviceRound]:
    at = f"in/schedule/round{r}"
    active, steps = vector[f"{at}/active"].tolist(), vector[f"{at}/steps"].tolist()
    lost = set(vector.get(f"{at}/lost", np.empty(0, np.int64)).tolist())
    copies = vector.get(f"{at}/copies", np.ones(len(active), np.int64)).tolist()

    def drawn(draw: Draw, device: int) -> Drawn:
        if draw.of == "step":
            return Drawn(vector[f"{at}/{draw.name}"][active.index(device)])
        if draw.of == "devices":
            return Drawn(vector.get(f"{at}/device{device}/{draw.name}", np.empty(0, np.int64)))
        found = vector[f"{at}/device{device}/{draw.name}"]
        if draw.of != "runs":
            return Drawn(found)
        count = steps[active.index(device)]  # a vector has the first samples of runs, none where a device has no run
        return Drawn(runs_from(found, draw.size) if len(found) else np.empty((count, 0), np.int64))

    return [
        DeviceRound(
            int(i),
            int(count),
            vector[f"{at}/device{i}/batch_l"],
            vector[f"{at}/device{i}/batch_u"],
            lost=i in lost,
            copies=int(times),
            extra={draw.name: drawn(draw, i) for draw in draws},
        )
        for i, count, times in sorted(zip(active, steps, copies, strict=True))
    ]


def _with_recorded_start(vector: Vector, state: State) -> State:
    """Return the state with what a vector says that the server starts with, by the name of a field."""
    given = {name: vector[f"in/{name}"] for name in state.server._fields if f"in/{name}" in vector}
    where = state.targets
    server = state.server._replace(**{name: torch.from_numpy(t).to(where) for name, t in given.items()})
    return state._replace(server=server)


def _with_recorded_views(vector: Vector, setup: Setup) -> tuple[Setup, dict[tuple[int, int], NDArray[np.int64]]]:
    """Return a setup whose views are looked up in the recorded ones, and the keys of each round and device."""
    method, tables = setup.terms.method, list[NDArray[Any]]()
    if not method.traits.views:
        return setup, {}
    keys = {}
    for r in range(vector["meta"]["rounds"]):
        at = f"in/schedule/round{r}"
        for i, steps in zip(vector[f"{at}/active"].tolist(), vector[f"{at}/steps"].tolist(), strict=True):
            keys[r, i] = _view_keys(vector, f"{at}/device{i}", steps, setup.terms.batch_widths, tables)
    if not tables:  # no device makes a step: no view is ever looked up
        return setup, keys
    recorded = torch.from_numpy(np.concatenate(tables)).to(setup.data.where)

    def look_up(x: Tensor, key: Tensor) -> Tensor:
        there = (key >= 0).reshape(key.shape + (1,) * (x.dim() - key.dim()))
        return torch.where(there, recorded[key.clamp_min(0)], x)

    method = method._replace(traits=method.traits._replace(views=Views(look_up, look_up)))
    return setup._replace(terms=setup.terms._replace(method=method, personal_method=method)), keys


def _view_keys(
    vector: Vector, at: str, steps: int, widths: tuple[int, int], tables: list[NDArray[Any]]
) -> NDArray[np.int64]:
    """Return where a device's views are among all recorded ones, to which they are added; -1 where none is."""
    pieces = []
    for name, width in (("weak_l", widths[0]), ("weak", widths[1]), ("strong", widths[1])):
        own = np.full((steps, width), -1)
        found = vector.get(f"{at}/{name}")
        if found is not None and found.size:
            first, count = sum(map(len, tables)), found.shape[1]
            own[:, :count] = first + np.arange(steps * count).reshape(steps, count)
            tables.append(found.reshape(-1, *found.shape[2:]))
        pieces.append(own)
    return np.concatenate(pieces, 1)


def _probes(vector: Vector, r: int, draw: Draw) -> list[Probe]:
    at = f"in/schedule/round{r}"
    return [Probe(i, Drawn(vector[f"{at}/device{i}/{draw.name}"])) for i in vector[f"{at}/probed"].tolist()]


def _compare_draw(vector: Vector, state: State) -> Iterator[Difference]:
    """Yield the differences of who is drawn by the server's weights, and how often, where numbers are recorded."""
    at, terms = f"in/schedule/round{state.round}", state.setup.terms
    if f"{at}/uniform" in vector:
        weights = optional(terms.algorithm, "draw_weights")(terms.method, state.server)
        drawn = draw_by_weight(weights.cpu().numpy(), vector[f"{at}/uniform"])
        for quantity, found in (("active", drawn.keys()), ("copies", drawn.values())):
            yield _difference(quantity, state.round, None, np.array([*found]), vector[f"{at}/{quantity}"])


def _compare(vector: Vector, state: State) -> Iterator[Difference]:
    for quantity, device, key, value in _recorded(state):
        if key in vector:
            yield _difference(quantity, state.round, device, value, vector[key])


def _recorded(state: State) -> list[tuple[str, int | None, str, NDArray[Any]]]:
    """Return what a vector may record of a state: quantity, device, key and our value."""
    at, setup = f"out/round{state.round}", state.setup
    called = {ours: theirs for theirs, ours in (optional(setup.terms.algorithm, "RECORDED") or {}).items()}
    found: list[tuple[str, int | None, str, NDArray[Any]]] = []
    predictions = predict(state, setup.data.test).personal.exp().cpu().numpy()

    def add(tree: Any, side: str, device: int | None, key: str) -> None:
        for field, value in named_leaves(tree).items():
            name = called.get(f"{side}.{field}", field)
            if side == "device" and field in setup.terms.method.traits.per_sample:
                own = value[: setup.terms.sizes.unlabelled[device]]
                found.append((name, device, f"{key}/{name}", own.cpu().numpy()))
                continue
            for rest, array in _by_name(setup, value).items():
                found.append((name, device, f"{key}/{name}{rest}", array))

    add(state.server, "server", None, at)
    general = setup.terms.algorithm.general_model(setup.terms.method, state.server)
    if "theta" not in state.server._fields and general is not None:
        found += [("theta", None, f"{at}/theta{rest}", array) for rest, array in _by_name(setup, general).items()]
    for i in range(setup.terms.devices):
        add(state.device(i), "device", i, f"{at}/device{i}")
        if any(name.startswith("broadcast.") for name in called):
            add(setup.terms.sent_to(state.server, i), "broadcast", i, f"{at}/device{i}")
        if name := called.get("own_model"):
            (own,) = own_models(state, [i], general)
            found += [(name, i, f"{at}/device{i}/{name}{rest}", t) for rest, t in _by_name(setup, own).items()]
        found.append(("nu", i, f"{at}/device{i}/nu", state.nu(i).cpu().numpy()))
        found.append(("prediction", i, f"{at}/device{i}/prediction", predictions[setup.data.test.rows(i)]))
    computed = objectives(state)._asdict() if applies(setup.terms.method) else {}
    return found + [(name, None, f"{at}/{name}", np.asarray(value)) for name, value in computed.items()]


def _by_name(setup: Setup, value: Tensor) -> dict[str, NDArray[Any]]:
    """Return a model's tensors by name, an empty one as zeros; and any tensor as it is.

    One number per device looks like a model where there are as many devices as parameters, so both are returned.
    """
    network, found = setup.terms.method.network, {"": value.cpu().numpy()}
    if value.dim() == 1 and value.numel() in (0, network.initial.numel()):
        named = network.named(value if value.numel() else torch.zeros_like(network.initial))
        found |= {f"/{name}": t.cpu().numpy() for name, t in named.items()}
    return found


def _not_compared(vector: Vector, state: State) -> Iterator[Difference]:
    """Yield recorded outputs that are not compared: a vector must not pass because it was not understood."""
    here = {key.replace(f"round{state.round}/", "", 1) for _, _, key, _ in _recorded(state)}
    for key in vector:
        after_round = re.sub(r"^out/round\d+/", "out/", key)
        if key.startswith("out/") and not key.startswith("out/final/") and after_round not in here:
            yield Difference(key, state.round, None, float("inf"), float("inf"))


def _compare_predictions(vector: Vector, state: State) -> Iterator[Difference]:
    predictions = predict(state, state.setup.data.test)
    for i in range(state.setup.terms.devices):
        log_h = predictions.personal[state.setup.data.test.rows(i)]
        expected = vector.get(f"out/final/device{i}/probabilities")
        if expected is not None:
            yield _difference("probabilities", state.round, i, log_h.exp().cpu().numpy(), expected)


def _difference(
    quantity: str, round: int, device: int | None, value: NDArray[Any], expected: NDArray[Any]
) -> Difference:
    if value.shape != expected.shape:
        return Difference(quantity, round, device, float("inf"), float("inf"))
    gap = np.abs(value - expected)
    allowed = ABSOLUTE + RELATIVE * np.abs(expected)
    worst = float((gap / allowed).max(initial=0.0))
    return Difference(quantity, round, device, worst if worst == worst else float("inf"), float(gap.max(initial=0.0)))
