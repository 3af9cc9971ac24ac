"""What an algorithm sends, and how often it sends a sample through the network: counted by doing one visit."""

import numpy as np
import torch

from fedcpsl.algorithm import Method, optional
from fedcpsl.device_round import is_relabelled
from fedcpsl.edge.compute import Passes
from fedcpsl.engine import counting
from fedcpsl.schedule import draw_tasks
from fedcpsl.simulation.device_data import load_samples
from fedcpsl.simulation.executors import Program, example_of, one_slot
from fedcpsl.simulation.round_request import RoundRequest, Slot, broadcasts_to, training_data_of
from fedcpsl.simulation.setup import Setup
from fedcpsl.trees import Tree, map_tensors


def sent_by(setup: Setup, method: Method) -> tuple[Tree, Tree, bool]:
    """One device's upload and what it is sent, by their shapes, and whether all are sent the same."""
    request = _request(setup, method)
    _, upload, _ = example_of(request, method)
    shared = request.rows is None
    return upload, request.broadcast if shared else map_tensors(lambda t: t[0], request.broadcast), shared


def passes_of(setup: Setup, method: Method) -> tuple[Passes, Passes, Passes]:
    """Passes through the network, as the algorithm makes them: of a step; once a visit, of each unlabelled sample;
    and once a visit whatever there is.
    """
    network, counter = counting(method.network)
    method = method._replace(network=network)
    request, device = _request(setup, method), _typical(setup)
    terms, targets = request.setup.terms, setup.data.one_hot
    if setup.data.supply is not None:
        targets = targets.clone()
        there = np.zeros(terms.devices, bool)
        load_samples(setup.data, setup.data.supply, targets, targets.new_zeros(0), there, [device])
    data = training_data_of(setup.data, targets)

    def visit(steps: int) -> Passes:
        work = terms.work._replace(unit="steps", amount=steps)
        drawn = draw_tasks(terms.seed, 0, [device], terms.sizes, work, **method.draws, recordings=setup.data.recordings)
        before = counter.trained, counter.forward
        task = drawn[0]._replace(personal=method.personal_round)
        if task.steps:
            one_slot(Program((), terms.algorithm, method, data), Slot(0, request, task))
        return Passes(counter.trained - before[0], counter.forward - before[1])

    one, two = visit(1), visit(2)
    step = Passes(two.trained - one.trained, two.forward - one.forward)
    once = Passes(one.trained - step.trained, one.forward - step.forward)
    labels = 0.0
    if is_relabelled(terms.algorithm, method, warming=False) and not method.personal_round:
        before = counter.forward
        _relabel_two(request, method, device)
        labels = (counter.forward - before) / 2
    samples = int(terms.sizes.unlabelled[device])
    if samples and (optional(terms.algorithm, "prepare_visit") or method.personal_round):  # a look at all samples
        return step, Passes(once.trained / samples, once.forward / samples + labels), Passes(0, 0)
    return step, Passes(0, labels), once


def _relabel_two(request: RoundRequest, method: Method, device: int) -> None:
    """The pseudo-labels of two samples, which are forgotten."""
    setup = request.setup
    hyper = map_tensors(lambda t: t[device], setup.terms.hyper)
    kept = map_tensors(lambda t: t[device].to(setup.data.where), request.devices)
    x = setup.data.one_hot.new_zeros(2, *method.network.input_shape)
    nu = setup.data.one_hot.new_full((2, method.network.classes), 1 / method.network.classes)
    relabel = optional(setup.terms.algorithm, "relabel")
    relabel(method, hyper, request.broadcast_to(device), kept, x, nu, torch.tensor(2, device=setup.data.where))


def _request(setup: Setup, method: Method) -> RoundRequest:
    """A request for one device, with the states that devices start with; those of the others take no memory."""
    counted = setup._replace(
        terms=setup.terms._replace(method=method, personal_method=method),
        machine=setup.machine._replace(vectorised=False),
    )
    terms = counted.terms
    server = setup.terms.first_server()
    broadcast, rows = broadcasts_to(counted, server, [_typical(setup)])
    one = setup.terms.first_device(server)
    devices = map_tensors(lambda t: t.expand(terms.devices, *t.shape), one)
    return RoundRequest(counted, (), devices, broadcast, rows=rows)


def _typical(setup: Setup) -> int:
    """A device that has samples of both kinds, or at least some."""
    sizes = setup.terms.sizes
    return int(np.argmax((sizes.labelled > 0).astype(int) + (sizes.unlabelled > 0)))
