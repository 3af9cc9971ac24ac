"""The edge network of a run: what its algorithm asks of devices, and rounds drawn by its physics."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedcpsl.algorithm import Method, optional
from fedcpsl.edge.availability import is_there
from fedcpsl.edge.cell import EdgeTerms, Load, edge_terms
from fedcpsl.edge.compute import Passes, compute_joules, cycles, flops, visit_cycles
from fedcpsl.edge.quantise import quantised_bits
from fedcpsl.edge.rounds import Drawn, drawn_devices, play
from fedcpsl.edge.settings import NONE, Edge, check_edge
from fedcpsl.edge.timeline import download_seconds
from fedcpsl.engine import forward_flops
from fedcpsl.errors import RefusedError
from fedcpsl.schedule import DeviceRound, Draw, draw_by_weight, draw_extra, draw_numbers, draw_roster_order, with_steps
from fedcpsl.schedule import Drawn as Extra
from fedcpsl.simulation.passes import passes_of, sent_by
from fedcpsl.simulation.round_request import broadcasts_to
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.state import State
from fedcpsl.trees import Tree, bytes_of


def with_edge(setup: Setup, edge: Edge) -> Setup:
    """The setup with an edge network: devices placed, and what the algorithm asks of each counted."""
    terms, traits = setup.terms, setup.terms.method.traits
    if traits.alone:  # nobody sends anything: a round is what devices compute
        edge = replace(edge, clock="rounds", wait_for=0, extra=0, correction="none", upload_bits=0, allocation="equal")
    check_edge(edge)
    _refuse_what_the_algorithm_lacks(setup, edge)
    forward = forward_flops(terms.method.network)
    loads = [load_of(setup, edge, method, forward) for method in (terms.method, terms.personal_method)]
    trained = cycles(flops(forward, Passes(1, 0)), edge.flops_per_cycle)
    wanted = terms.devices if traits.everyone else terms.work.active
    found = edge_terms(edge, terms.names, terms.seed, (loads[0], loads[1]), trained, wanted, terms.sizes.unlabelled)
    _refuse_what_nobody_can_do(setup, found)
    return setup._replace(edge=found)


def _refuse_what_the_algorithm_lacks(setup: Setup, edge: Edge) -> None:
    terms, algorithm = setup.terms, setup.terms.algorithm
    weighted, semi = optional(algorithm, "draw_weights") is not None, edge.clock == "semi-async"
    others = terms.devices - terms.work.active
    problems = [
        (
            terms.method.traits.probe is not None or optional(algorithm, "reply_each") is not None,
            "[edge]: this algorithm has a second exchange in a round, which has no clock here; leave [edge] out",
        ),
        (weighted and edge.extra > 0, "edge.extra: this algorithm draws devices by weights of its own; give 0"),
        (
            edge.extra > others and not terms.method.traits.everyone,
            f"edge.extra = {edge.extra}: there are {others} devices beyond work.active = {terms.work.active}; "
            "give at most that",
        ),
        (
            edge.correction == "inverse" and optional(algorithm, "reweighted") is None,
            'edge.correction = "inverse": this algorithm has no `reweighted`, so it cannot weigh updates; give "none"',
        ),
        (
            semi and (optional(algorithm, "late") is None or weighted or terms.method.traits.everyone),
            'edge.clock = "semi-async": this algorithm does not allow late updates (it has no `late`, or needs all '
            'devices); give "rounds"',
        ),
        (
            semi and edge.staleness > 0 and optional(algorithm, "reweighted") is None,
            "edge.staleness: this algorithm has no `reweighted`, so it cannot weigh updates; give 0",
        ),
        (
            semi and terms.personal_rounds > 0,
            'edge.clock = "semi-async": uploads would still be on their way; give work.personal_rounds = 0',
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise RefusedError(message)


def load_of(setup: Setup, edge: Edge, method: Method, forward: float) -> Load:
    """What one method asks of a device: bits of what is sent, cycles of a step and of what is done once a visit."""
    upload, sent, shared = sent_by(setup, method)
    sizes = method.network.sizes
    up = quantised_bits(upload, edge.upload_bits, sizes) if edge.upload_bits else 8 * bytes_of(upload)
    step, sample, visit = (cycles(flops(forward, passes), edge.flops_per_cycle) for passes in passes_of(setup, method))
    sends = not method.sends_nothing
    bits = (float(up), float(8 * bytes_of(sent))) if sends else (0.0, 0.0)
    return Load(*bits, step, sample, visit, shared, sends)


def _refuse_what_nobody_can_do(setup: Setup, terms: EdgeTerms) -> None:
    """Refuse a deadline that nobody can meet, and a battery that lets nobody finish, without fading."""
    load, everybody = terms.load, np.arange(terms.devices)
    planned = _least_steps(setup)
    if terms.deadline is not None and terms.settings.on_deadline == "partial":
        planned = np.minimum(planned, 1)
    some = planned > 0
    if not some.any():
        return
    hertz, bits = terms.cell.clock, np.full(terms.devices, load.bits_down)
    worked = visit_cycles(planned, load.cycles, terms.once(load, everybody))
    slot = terms.slot if load.sends else 0.0
    needed = download_seconds(terms, load, everybody, np.ones(terms.devices), bits) + worked / hertz + slot
    if terms.deadline is not None and needed[some].min() > terms.deadline:
        least = float(needed[some].min())
        raise RefusedError(
            f"edge.deadline = {terms.settings.deadline}: nobody can meet it, the fastest device takes {least:.3g} s, "
            f"{least - terms.deadline:.3g} s more; give a longer one, or less work"
        )
    joules = compute_joules(worked, hertz, terms.settings.kappa) + terms.radio.power * slot
    if terms.settings.battery != NONE and joules[some].min() > float(terms.settings.battery):
        raise RefusedError(
            f"edge.battery = {terms.settings.battery}: no device could finish a visit, which takes at least "
            f"{joules[some].min():.3g} J; give more, or less work"
        )


def _least_steps(setup: Setup) -> NDArray[np.int64]:
    """The fewest steps that a round can plan for each device."""
    terms, work = setup.terms, setup.terms.work
    n, m = terms.sizes
    uses = terms.method.traits.unlabelled
    has_data = (n > 0) | ((m > 0) & uses)
    epoch = np.ceil(np.maximum(n / work.batch_labelled, m / work.batch_unlabelled if uses or work.matched else 0))
    amount = {"steps": np.full(len(n), work.amount), "hlu": epoch * work.hlu[0]}.get(work.unit, epoch * work.amount)
    return np.where(has_data, amount, 0).astype(np.int64)


def draw_there(state: State, weights: NDArray[np.float64] | None) -> tuple[Drawn, dict[int, int]]:
    """Who of those there takes part in the next round, and how often each was drawn; `weights`: the server's."""
    setup, terms, round = state.setup, state.setup.terms, state.round
    assert setup.edge is not None
    assert state.edge is not None
    roster = terms.roster(round)
    if round >= terms.rounds:  # a device needs nobody to train its own model
        is_there(setup.edge, state.edge, roster)  # its battery may have been recharged
        return Drawn(state.edge, roster), dict.fromkeys(roster.tolist(), 1)
    if weights is not None:
        drawn = drawn_devices(setup.edge, state.edge, roster, len(roster))
        there = np.zeros(len(weights))
        there[drawn.devices] = 1
        copies = draw_by_weight(weights * there, draw_numbers(terms.seed, round, terms.work.active))
        return drawn._replace(devices=np.array([*copies], np.int64)), copies
    everyone = terms.method.traits.everyone
    order = roster if everyone else draw_roster_order(terms.seed, round, roster)
    wanted = len(roster) if everyone else terms.work.active + terms.spare
    under_way = 0 if state.edge.flight is None else len(state.edge.flight.device)
    drawn = drawn_devices(setup.edge, state.edge, order, max(wanted - under_way, 0))
    return drawn, dict.fromkeys(drawn.devices.tolist(), 1)


def played(state: State, server: Tree, drawn: Drawn, plan: Sequence[DeviceRound]) -> tuple[State, list[DeviceRound]]:
    """The state with its edge network after the round, and the plan as physics allow it: steps, losses, weights."""
    setup, terms = state.setup, state.setup.terms
    assert setup.edge is not None
    outcome = play(
        setup.edge,
        drawn,
        state.round,
        np.array([task.steps for task in plan], np.int64),
        bits_down=_bits_down(setup, server, plan) if state.round < terms.rounds else None,
        lost_anyway=np.array([task.lost for task in plan], bool),
        loss_rate=terms.work.loss_rate,
        personal=state.round >= terms.rounds,
    )
    weights = np.ones(len(plan)) if setup.edge.semi_async else outcome.weight
    found = []
    of_each = (values.tolist() for values in (outcome.steps, outcome.lost, outcome.sends, weights))
    for task, steps, lost, sends, weight in zip(plan, *of_each, strict=True):

        def again(draw: Draw, device: int = task.device, steps: int = steps) -> Extra:
            return draw_extra(draw, terms.seed, state.round, device, steps, terms.sizes, terms.work)

        cut, lost = with_steps(task, steps, terms.method.traits.draws, again), lost and not task.personal
        same = (cut.lost, cut.sends, cut.weight) == (lost, sends, weight)
        found.append(cut if same else cut._replace(lost=lost, sends=sends, weight=weight))
    return state._replace(edge=outcome.state), found


def _bits_down(setup: Setup, server: Tree, plan: Sequence[DeviceRound]) -> NDArray[np.float64] | None:
    """What each device is sent, where devices are sent more or less; None: as much as any."""
    size = optional(setup.terms.algorithm, "broadcast_size")
    if size is None or not plan:
        return None
    broadcast, _ = broadcasts_to(setup, server, [task.device for task in plan], plan)
    numbers = size(setup.terms.method, broadcast).cpu().numpy().astype(float)
    found: NDArray[np.float64] = 8.0 * setup.terms.method.network.initial.element_size() * numbers
    return found
