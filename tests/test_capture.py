"""Local steps as CUDA graphs give what single steps give. Most of it needs a GPU."""

import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedcpsl import config
from fedcpsl.data.federation import Federation
from fedcpsl.errors import InputError
from fedcpsl.models import make_model
from fedcpsl.simulation import capture, initial_state, prepare
from fedcpsl.simulation.capture import WASTE, captured_steps, ladder
from fedcpsl.simulation.executors import local_rounds, stretches
from fedcpsl.simulation.round_request import RoundRequest, training_data_of
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.trees import map_tensors

from .conftest import needs_gpu, small_federation, small_model
from .test_conformance import WORK, assert_equal, final


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7, 20, 50, 333])
def test_no_number_of_slots_wastes_much(slots):
    widths = ladder(slots)
    assert widths[0] == slots
    assert widths[-1] == 1
    for needed in range(1, slots + 1):
        assert min(w for w in widths if w >= needed) <= WASTE * needed


def test_unequal_steps_compute_at_most_a_third_more():
    counts = sorted([1, 2, 2, 3, 5, 8, 13, 21, 34, 40], reverse=True)
    widths = ladder(len(counts))
    computed = sum(len(steps) * min(w for w in widths if w >= slots) for steps, slots in stretches(counts))
    assert sum(counts) <= computed <= WASTE * sum(counts)


def setup_of(model, device="cuda", dtype="float64", name="fedcpsl", work=WORK, **numbers):
    chosen = {"eta": 0.05, "alpha_p": 0.5, "alpha_r": 0.2, "beta": [0.1, 0.9, 0.0, 1.0, 0.5]} | numbers
    run = config.Run(executor="vectorised", dtype=dtype, seed=3, device=device)
    return prepare(small_federation(), model, config.Algorithm(name=name, **chosen), work, run)


def uncaptured(setup):
    state = initial_state(setup)
    while state.round < setup.terms.total_rounds:
        state = next_state(state, draw_plan(state))
    return state


def deep(kind):
    torch.manual_seed(0)
    if kind == "plain":
        return small_model()
    if kind == "dropout":
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 3))


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "dropout", "convolution"])
@pytest.mark.parametrize("name", ["fedcpsl", "apfl", "fedavg", "scaffold", "local-pseudo"])
def test_captured_steps_are_the_steps(name, kind):
    work = replace(WORK, rounds=6)
    setup = setup_of(deep(kind), name=name, work=work, warm_up=1 if name == "fedcpsl" else 0)
    assert_equal(final(setup), uncaptured(setup))


OWN = {  # settings with which every part of an algorithm is at work
    "perfedavg-hf": {"alpha": 0.3},
    "flexmatch": {"tau": 0.45, "eta": 0.3},
    "fedhar": {"T": 3, "s_max": 0.5, "R_s": 2},
    "semifed": {"tau": 0.35, "first_stage": 2},
    "fedmatch": {"tau": 0.35, "helper_every": 2, "lam_s": 3.0, "lam_2": 0.2},
}


def own_setup(name, kind, device):
    chosen = config.algorithm_settings(name)(**{"name": name, "eta": 0.05} | OWN[name])
    run = config.Run(executor="vectorised", dtype="float64", seed=3, device=device, processes=1)
    return prepare(small_federation(), deep(kind), chosen, replace(WORK, rounds=6), run)


@needs_gpu
@pytest.mark.parametrize("kind", ["plain", "dropout", "convolution"])
@pytest.mark.parametrize("name", sorted(OWN))
def test_captured_steps_of_other_algorithms_are_the_steps(name, kind):
    setup = own_setup(name, kind, "cuda")
    assert_equal(final(setup), uncaptured(setup))
    if name == "flexmatch":
        assert_equal(final(setup), final(own_setup(name, kind, "cuda")), tolerance=0)


@pytest.mark.parametrize("kind", ["plain", "dropout"])
@pytest.mark.parametrize("name", sorted(OWN))
def test_what_a_stage_holds_is_what_steps_read(name, kind, monkeypatch):
    """Without a GPU: the same buffers, filled and read in the same way, with steps in place of graphs."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(capture, "_capture", steps_on_buffers)
    setup = own_setup(name, kind, "cpu")
    take, state = captured_steps(), initial_state(setup)
    while state.round < setup.terms.total_rounds:
        state = next_state(state, draw_plan(state), partial(local_rounds, take_steps=take))
    assert_equal(state, uncaptured(setup))


def steps_on_buffers(program, stage, width, steps, _memory):
    def replay():
        hyper, local = (map_tensors(lambda t: t[:width], tree) for tree in (stage.hyper, stage.local))
        begun = local
        ahead = stage.step + torch.arange(steps)
        for samples in capture._samples(program.data, stage.batches.of_slots(slice(0, width)), ahead):
            local = program.algorithm.step(program.method, hyper, local, samples)
        map_tensors(capture._copy_back, begun, local)
        stage.step.add_(steps)

    return SimpleNamespace(replay=replay)


@needs_gpu
def test_they_agree_with_one_device_after_another_on_the_cpu():
    captured = final(setup_of(deep("plain")))
    run = config.Run(executor="sequential", dtype="float64", seed=3, device="cpu")
    algorithm = config.Algorithm(eta=0.05, alpha_p=0.5, alpha_r=0.2, beta=[0.1, 0.9, 0.0, 1.0, 0.5])
    reference = final(prepare(small_federation(), deep("plain"), algorithm, WORK, run))
    for name in ("theta", "c"):
        a, b = getattr(captured.server, name).cpu(), getattr(reference.server, name)
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@needs_gpu
def test_the_same_seed_gives_the_same_bits():
    assert_equal(final(setup_of(deep("plain"))), final(setup_of(deep("plain"))), tolerance=0)


class ReadsItsInput(nn.Module):
    """A model that looks at numbers on the host, which no graph can."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        torch.cuda.synchronize()
        return self.layer(x)


@needs_gpu
def test_a_model_that_cannot_be_captured_runs_all_the_same_and_says_so(caplog):
    torch.manual_seed(0)
    setup = setup_of(ReadsItsInput())
    with caplog.at_level(logging.WARNING, logger="fedcpsl"):
        state = final(setup)
    assert "cannot be captured" in caplog.text
    assert_equal(state, uncaptured(setup))


@needs_gpu
def test_rounds_of_growing_size_make_a_larger_stage():
    setup = setup_of(deep("plain"), work=replace(WORK, rounds=1))
    take = captured_steps()
    for active, amount in ((2, 1), (4, 3), (3, 9)):
        state = initial_state(setup)
        work = setup.terms.work._replace(active=active, unit="steps", amount=amount)
        plan = draw_plan(state._replace(setup=setup._replace(terms=setup.terms._replace(work=work))))
        request = RoundRequest(setup, plan, state.devices, state.server)
        ends = [
            next(iter(local_rounds([request], training_data_of(setup.data, state.targets.clone()), take_steps=t)))
            for t in (take, None)
        ]
        assert torch.allclose(ends[0].upload.delta, ends[1].upload.delta, rtol=1e-10, atol=1e-12)


def test_how_wide_a_round_is_laid_out_does_not_depend_on_the_rounds_before(monkeypatch):
    """A round of 9 slots where 10 are possible is laid out alike after one of 10, and as the first after a resume."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    widths = []
    monkeypatch.setattr(
        capture,
        "_capture",
        lambda program, stage, width, steps, memory: (
            widths.append(width) or steps_on_buffers(program, stage, width, steps, memory)
        ),
    )
    run = config.Run(executor="vectorised", dtype="float64", seed=3, device="cpu")
    federation, work = small_federation(sizes=[(3, 5)] * 10), replace(WORK, active=10, rounds=1, unit="steps", amount=1)
    setup = prepare(federation, small_model(), config.Algorithm(eta=0.05), work, run)
    state, found = initial_state(setup), []
    plan = draw_plan(state)
    for plans in ([plan[:9]], [plan, plan[:9]]):
        take = captured_steps()
        for slots in plans:
            widths.clear()
            request = RoundRequest(setup, slots, state.devices, state.server)
            list(local_rounds([request], training_data_of(setup.data, state.targets.clone()), take_steps=take))
        found.append(set(widths))
    assert found[0] == {10}
    assert found[1] == set()  # the graph of 10 slots was there already


def test_simulating_on_a_cpu_captures_nothing(monkeypatch):
    def capture():
        raise AssertionError("a CPU has no graphs to capture")

    monkeypatch.setattr("fedcpsl.simulation.workers.captured_steps", capture)
    assert final(setup_of(deep("plain"), device="cpu")).round == WORK.rounds


@needs_gpu
@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_a_round_in_float32_is_near_one_device_after_another(name):
    """By whatever kernels the GPU was given: IEEE within 1e-4 of plain PyTorch, the coarser ones visibly near."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (400, 3, 32, 32), dtype=np.uint8), rng.integers(0, 10, 400)
    federation = Federation.from_arrays(x, y, np.arange(400) % 4, labelled=0.5)
    torch.manual_seed(0)
    model = make_model(name, [200, 200], (3, 32, 32), 10)
    work = config.Work(rounds=1, active=4, unit="steps", amount=10)
    ends = {}
    for executor, precision in [("sequential", "ieee"), *(("vectorised", p) for p in ("ieee", "tf32", "bf16"))]:
        run = config.Run(executor=executor, device="cuda", precision=precision)
        state = final(prepare(federation, model, config.Algorithm(eta=0.002), work, run))
        ends[executor, precision] = torch.cat([state.server.theta, state.devices.theta_lc.flatten()])
    reference = ends["sequential", "ieee"]

    def away(precision):
        return ((ends["vectorised", precision] - reference).norm() / reference.norm()).item()

    assert away("ieee") < 1e-4
    assert away("ieee") < away("tf32") < 1e-2
    assert away("bf16") < 2e-2


def test_only_a_gpu_takes_a_coarser_precision():
    with pytest.raises(InputError, match="give ieee"):
        prepare(small_federation(), small_model(), config.Algorithm(), run=config.Run(precision="bf16", device="cpu"))
