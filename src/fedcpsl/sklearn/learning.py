"""Train models from samples and settings, as plain arrays, and predict probabilities with them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcpsl.algorithm import log_answers, optional
from fedcpsl.config import Config
from fedcpsl.data.federation import array_source, federate
from fedcpsl.data.scaling import Scaling, fit_scaling
from fedcpsl.data.split import Shares
from fedcpsl.engine import Network
from fedcpsl.errors import InputError
from fedcpsl.evaluation import own_models, prediction_numbers
from fedcpsl.methods import Resolved, resolved
from fedcpsl.models import choose_model, make_model
from fedcpsl.schedule import stream
from fedcpsl.settings import Work
from fedcpsl.simulation import Setup, State, prepare, simulate
from fedcpsl.simulation.device_data import normalise
from fedcpsl.simulation.setup import choose_eta
from fedcpsl.simulation.workers import one_thread
from fedcpsl.step_size import with_step_size

ROWS_AT_ONCE = 16384
_RANDOMNESS = Lock()
MakeModel = Callable[[tuple[int, ...], int], nn.Module]


class Learnt(NamedTuple):
    """All that predictions need, as arrays and plain values."""

    settings: Any  # of the algorithm
    work: Work
    model: str | MakeModel
    hidden: list[int]
    shape: tuple[int, ...]  # of one input
    classes: int
    fixed: dict[str, NDArray[Any]]  # parameters and buffers of the network that are not trained
    general: NDArray[Any] | None  # [parameters]; None where there is no server
    own: NDArray[Any] | None  # [devices, parameters]; None where devices have no models of their own
    numbers: dict[str, NDArray[Any]]  # that predictions need, [devices, ...]
    trained: NDArray[np.bool_]  # [devices]
    active_rounds: NDArray[np.int64]  # [devices]
    scaling: Scaling | None


def learn(
    config: Config,
    model: str | MakeModel,
    x: NDArray[Any],
    y: NDArray[np.int64],
    owner: NDArray[np.int64],
    names: tuple[str, ...],
) -> Learnt:
    """Simulate all rounds; nothing is written and no sample is held out."""
    scaling = fit_scaling(x, np.arange(len(x))) if config.data.normalise != "none" else None
    pieces = [_inputs(x[i : i + ROWS_AT_ONCE], scaling).float() for i in range(0, len(x), ROWS_AT_ONCE)]
    source = array_source(torch.cat(pieces).numpy(), y, owner)._replace(names=names)
    federation = federate(source, Shares(test=0.0, server=config.data.server), normalise=False, seed=config.run.seed)
    model = choose_model(model, federation.shape, "") if isinstance(model, str) else model
    with _own_randomness():
        torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
        module = _module(model, config.model.hidden, federation.shape, federation.classes)
        algorithm = with_step_size(federation, module, config.algorithm, config.work, config.run)
        setup = prepare(federation, module, algorithm, config.work, config.run)
    if setup.machine.store == "disk":
        setup = setup._replace(machine=setup.machine._replace(store="host"))
    state = _last(setup)
    method = setup.terms.method_after(state.round)
    general = setup.terms.algorithm.general_model(method, state.server)
    own, found = None, prediction_numbers(state, range(len(names)))
    needed = optional(setup.terms.algorithm, "PREDICTS_WITH") or ()
    numbers = {name: getattr(found, name).cpu().numpy() for name in needed}
    if method.traits.personal:
        own = own_models(state, range(len(names)), general).cpu().numpy()
    return Learnt(
        settings=replace(algorithm, eta=choose_eta(algorithm.eta, "", "epochs")),
        work=config.work,
        model=model,
        hidden=config.model.hidden,
        shape=federation.shape,
        classes=federation.classes,
        fixed={name: t.numpy() for name, t in module.state_dict().items() if name not in method.network.shapes},
        general=None if general is None else general.cpu().numpy(),
        own=own,
        numbers=numbers,
        trained=_have_trained(state),
        active_rounds=state.active_rounds,
        scaling=scaling,
    )


@torch.no_grad()
def probabilities(learnt: Learnt, x: NDArray[Any], owner: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the probabilities by the personal model of every sample's device, or by the global model for -1."""
    found = _resolved(learnt)
    predictions = np.empty((len(x), learnt.classes))
    for first in range(0, len(x), ROWS_AT_ONCE):
        some = slice(first, first + ROWS_AT_ONCE)
        inputs = _inputs(x[some].reshape(-1, *learnt.shape), learnt.scaling)
        predictions[some] = _log_predictions(learnt, found, inputs, owner[some]).exp().numpy()
    return predictions


def _log_predictions(learnt: Learnt, found: Resolved, x: Tensor, owner: NDArray[np.int64]) -> Tensor:
    method = found.kept_method(learnt.work)
    network, general = method.network, None
    if learnt.general is not None:
        general = log_answers(method, _tensor(learnt.general), x)
    mine = np.flatnonzero(owner >= 0)
    if not len(mine):
        assert general is not None
        return general
    localized = None if learnt.own is None else x.new_empty(len(x), network.classes)
    if localized is not None and learnt.own is not None:
        for i in np.unique(owner[mine]):
            rows = torch.from_numpy(np.flatnonzero(owner == i))
            localized[rows] = log_answers(method, _tensor(learnt.own[i]), x[rows])
    hyper = SimpleNamespace(**{name: _tensor(each[owner[mine]]) for name, each in learnt.numbers.items()})
    both = (None if each is None else each[mine][:, None] for each in (general, localized))
    personal = found.algorithm.predict(method, hyper, *both)[:, 0]
    if general is None:
        return personal
    general[mine] = personal
    return general


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Restore PyTorch's random state afterwards; locked, because all threads share it."""
    with _RANDOMNESS, torch.random.fork_rng(devices=[]):
        yield


def _last(setup: Setup) -> State:
    """Return the state after all rounds, with one thread: other cores are left to a search's jobs."""
    with one_thread():
        for state in simulate(setup):
            last = state
    return last


def _have_trained(state: State) -> NDArray[np.bool_]:
    """Return which devices have trained: active ones; in personal rounds all with samples that the algorithm uses."""
    setup = state.setup
    if optional(setup.terms.algorithm, "adapted"):
        return setup.terms.sizes.labelled > 0
    usable = setup.terms.sizes.labelled + setup.terms.method.traits.unlabelled * setup.terms.sizes.unlabelled
    return (state.active_rounds > 0) | (setup.terms.personal_rounds > 0) & (usable > 0)


def _resolved(learnt: Learnt) -> Resolved:
    """Return the algorithm for predictions; in float64, so that a prediction does not depend on the other samples."""
    with _own_randomness():
        module = _module(learnt.model, learnt.hidden, learnt.shape, learnt.classes)
        fixed = {name: torch.from_numpy(np.asarray(t)) for name, t in learnt.fixed.items()}
        module.load_state_dict(fixed, strict=False)
        network = Network(module, torch.zeros(1, *learnt.shape, dtype=torch.float64), learnt.classes)
    return resolved(learnt.settings, network, learnt.work)


def _module(model: str | MakeModel, hidden: list[int], shape: tuple[int, ...], classes: int) -> nn.Module:
    if isinstance(model, str):
        return make_model(model, hidden, shape, classes)
    if isinstance(model, nn.Module):
        raise InputError("model: is a network; give a function of (input shape, classes) that returns it")
    module = model(shape, classes)
    if not isinstance(module, nn.Module):
        raise InputError(f"model: returned a {type(module).__name__} where an nn.Module is needed")
    return module


def _inputs(x: NDArray[Any], scaling: Scaling | None) -> Tensor:
    """Return samples as inputs of the network."""
    given = _tensor(x)
    return given if scaling is None else normalise(given, *map(_tensor, scaling))


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.array(array, np.float64))
