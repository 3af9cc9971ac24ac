"""Many runs side by side: each equals the run alone, whatever its group."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcpsl import config, evaluation
from fedcpsl.algorithms import family
from fedcpsl.data.federation import Federation
from fedcpsl.engine.precision import Arithmetic
from fedcpsl.evaluation import evaluate, evaluate_together, examiner
from fedcpsl.evaluation import own_models as own
from fedcpsl.simulation import prepare, simulate, simulate_together
from fedcpsl.simulation.executors import groups
from fedcpsl.simulation.round_request import RoundRequest, joint_data
from fedcpsl.simulation.rounds import draw_plan, initial_state
from fedcpsl.simulation.tuning import slots_that_fit

from .conftest import needs_gpu, small_federation, small_model
from .test_conformance import WORK, assert_equal

CASES = [
    {"name": "fedcpsl"},
    {"name": "fedcpsl", "beta": 0.25, "gamma": 0.2, "eta": 0.02},
    {"name": "apfsl", "alpha_p": 0.1, "alpha_r": 0.0},
    {"name": "apfl"},
    {"name": "fedshvrp", "warm_up": 1},
    {"name": "fedshvr"},
    {"name": "fedavg"},
    {"name": "scaffold"},
    {"name": "local"},
    {"name": "local-pseudo"},
    {"name": "fedcpsl", "labels_from": "mixture"},
    {"name": "fedcpsl", "pseudo_labels": "gradient"},
]


def setups(run, work=WORK, cases=CASES, validation=0):
    made = []
    for i, case in enumerate(cases):
        torch.manual_seed(i)
        numbers = {"eta": 0.05, "alpha_p": 0.5, "alpha_r": 0.2} | case
        active = "auto" if case["name"] == "fedshvr" else 2 + i % 3
        made.append(
            prepare(
                small_federation(seed=i % 2, validation=validation),
                small_model(),
                config.Algorithm(**numbers),
                replace(work, active=active, unit="hlu" if i % 2 else "epochs"),
                replace(run, seed=i % 3),
                beside=made[0] if made else None,
            )
        )
    return made


@pytest.fixture
def _precision_as_before():
    matmul, convolutions = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, convolutions


@pytest.mark.usefixtures("_precision_as_before")
def test_runs_that_take_turns_keep_their_own_precision(monkeypatch):
    """PyTorch's setting is one for the whole process; on a CPU it changes nothing, but it can be seen."""
    run, work = config.Run(processes=1, dtype="float64", device="cpu"), replace(WORK, active=2, rounds=3)
    setups, seen = {}, []
    for precision in ("tf32", "ieee"):
        setups[precision] = prepare(small_federation(), small_model(), config.Algorithm(eta=0.05), work, run)
        setups[precision].terms.method.network.arithmetic = Arithmetic(precision)

    def noting(whole):
        def note(*given):
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return whole(*given)

        return note

    for name in ("relabel", "step", "apply"):
        monkeypatch.setattr(family, name, noting(getattr(family, name)))
    simulations, states = {name: simulate(setup) for name, setup in setups.items()}, {}
    for precision in ("tf32", "ieee") * 3:
        seen.clear()
        states[precision] = next(simulations[precision])
        assert set(seen) <= {precision == "tf32"}
        assert bool(seen) == (states[precision].round > 0)
        evaluate(states[precision])
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    for precision in ("ieee", "tf32"):  # resumed, after another run's
        seen.clear()
        next(simulate(setups[precision], states[precision]))
        assert set(seen) == {precision == "tf32"}


def test_a_run_beside_another_keeps_its_own_layers():
    run, work = config.Run(processes=1, dtype="float64", device="cpu"), replace(WORK, active=2)
    models = [
        torch.nn.Sequential(torch.nn.Linear(6, 8), kind(), torch.nn.Linear(8, 3))
        for kind in (torch.nn.Tanh, torch.nn.ReLU)
    ]
    one = prepare(small_federation(), models[0], config.Algorithm(eta=0.05), work, run)
    like, other = (
        prepare(small_federation(), model, config.Algorithm(eta=0.1), work, run, beside=one) for model in models
    )
    assert like.terms.method.network.module is one.terms.method.network.module
    x, theta = torch.randn(4, 6, dtype=torch.float64), other.terms.method.network.initial
    expected = torch.log_softmax(models[1].double()(x), -1)
    assert torch.allclose(other.terms.method.network.log_probabilities(theta, x), expected)


def last(rounds):
    *_, end = rounds
    return end


def together_and_alone(run, **given):
    made = setups(run, **given)
    sequential = setups(replace(run, executor="sequential", processes=1), **given)
    return last(simulate_together(made)), [last(simulate(setup)) for setup in sequential]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_run_of_a_group_is_the_run_alone_one_device_after_another(processes):
    if processes > 1 and torch.cuda.is_available():
        pytest.skip("processes are not forked beside a GPU")
    run = config.Run(executor="vectorised", dtype="float64", processes=processes, device="cpu")
    for one, other in zip(*together_and_alone(run), strict=True):
        assert_equal(one, other)


def test_one_device_after_another_in_a_group_too():
    run = config.Run(executor="sequential", dtype="float64", processes=1, device="cpu")
    for one, other in zip(*together_and_alone(run), strict=True):
        assert_equal(one, other)


@needs_gpu
@pytest.mark.parametrize("slots", [0, 5])
def test_on_a_gpu_too(slots):
    run = config.Run(executor="vectorised", dtype="float64", device="cuda", slots=slots)
    for one, other in zip(*together_and_alone(run), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("slots", [1, 3, 100])
def test_chunks_change_nothing(slots):
    run = config.Run(executor="vectorised", dtype="float64", processes=1, slots=slots, device="cpu")
    whole = last(simulate_together(setups(replace(run, slots=0))))
    for one, other in zip(last(simulate_together(setups(run))), whole, strict=True):
        assert_equal(one, other)


def test_personal_rounds_go_together():
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    cases = [{"name": "fedcpsl"}, {"name": "apfl"}, {"name": "fedcpsl", "beta": 0.3}]
    given = {"work": replace(WORK, personal_rounds=2), "cases": cases}
    for one, other in zip(*together_and_alone(run, **given), strict=True):
        assert_equal(one, other)


def test_runs_of_unequal_length_end_when_they_are_done():
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    short, long = setups(run, cases=CASES[:2], work=replace(WORK, rounds=2)), setups(run, cases=CASES[:2])
    mixed = [short[0], long[1]]
    alone = [last(simulate(setup)) for setup in mixed]
    for one, other in zip(last(simulate_together(mixed)), alone, strict=True):
        assert one.round == one.setup.terms.total_rounds
        assert_equal(one, other)


def test_what_has_the_same_shapes_is_one_group():
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    made = setups(run, cases=[{"name": n} for n in ("fedcpsl", "apfsl", "fedcpsl", "apfl", "fedavg", "fedshvrp")])
    states = [initial_state(setup) for setup in made]
    requests = [
        RoundRequest(s.setup, draw_plan(s), s.devices, s.setup.terms.algorithm.broadcast(s.server)) for s in states
    ]
    data = joint_data([setup.data for setup in made], [state.targets for state in states])
    runs = [sorted({slot.run for slot in group}) for _, group in groups(requests, data)]
    assert runs == [[0, 1, 2], [3], [4], [5]]


def test_another_model_is_not_mixed_in():
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    first = prepare(small_federation(), small_model(), config.Algorithm(), WORK, run)
    torch.manual_seed(1)
    wider = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
    other = prepare(small_federation(), wider, config.Algorithm(), WORK, run, beside=first)
    assert other.terms.method.network.module is not first.terms.method.network.module
    for one, alone in zip(last(simulate_together([first, other])), (first, other), strict=True):
        assert_equal(one, last(simulate(alone)))


def test_bytes_stay_bytes_and_give_the_same_numbers(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 1, 4, 4), dtype=np.uint8), np.arange(60) % 3
    federation = Federation.from_arrays(x, y, np.arange(60) % 5, labelled=0.5)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    given = (federation, model, config.Algorithm(), WORK, config.Run(dtype="float64", processes=1, device="cpu"))
    numbers = prepare(*given)
    monkeypatch.setattr("fedcpsl.simulation.device_data.MANY_BYTES", 0)
    in_bytes = prepare(*given)
    assert (numbers.data.inputs.raw.dtype, in_bytes.data.inputs.raw.dtype) == (torch.float64, torch.uint8)
    assert_equal(last(simulate(in_bytes)), last(simulate(numbers)), tolerance=0)


def test_runs_on_the_same_samples_share_them():
    federation = small_federation()
    run = config.Run(processes=1, device="cpu")
    first = prepare(federation, small_model(), config.Algorithm(), WORK, run)
    second = prepare(federation, small_model(), config.Algorithm(), WORK, replace(run, seed=1), beside=first)
    assert second.data.inputs.raw is first.data.inputs.raw


def test_evaluating_together_is_evaluating_each():
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    states = last(simulate_together(setups(run)))
    for one, state in zip(evaluate_together(states, [None] * len(states)), states, strict=True):
        assert one.metrics(state) == evaluate(state).metrics(state)


@pytest.mark.parametrize("validation", [0, 3])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("work", [WORK, replace(WORK, personal_rounds=3)])
def test_an_evaluation_that_reuses_what_it_can_is_the_evaluation(work, device, validation):
    cases = [{"name": "fedcpsl"}, {"name": "apfl"}, {"name": "fedcpsl", "beta": 0.3}]
    cases += [] if work.personal_rounds else [{"name": "fedavg"}, {"name": "local"}]
    run = config.Run(executor="vectorised", dtype="float64", device=device, processes=1)
    examine, noted = examiner(), []
    for states in simulate_together(setups(run, work, cases, validation)):
        noted.append((states, examine(states), [evaluate(state) for state in states]))
    assert len(noted) == 1 + work.rounds + work.personal_rounds
    for states, pending, expected in noted:
        for state, one, other in zip(states, pending.read(), expected, strict=True):
            found, wanted = one.metrics(state), other.metrics(state)
            losses = [{k: v for k, v in m.pop("losses").items() if v is not None} for m in (found, wanted)]
            assert found == wanted
            assert (found["validation"] is None) == (validation == 0)
            assert losses[0] == pytest.approx(losses[1], rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("validation", [0, 3])
@pytest.mark.parametrize("more", [{}, {"personal_rounds": 3}])
def test_predictions_renewed_in_place_are_the_predictions(validation, more):
    """What a GPU does between captured evaluations, and the captured part itself, without a graph."""
    work = replace(WORK, **more)
    cases = [{"name": "fedcpsl"}, {"name": "apfl"}, {"name": "fedcpsl", "beta": 0.3}]
    cases += [] if more else [{"name": "fedavg"}, {"name": "local"}]
    run, made = config.Run(executor="vectorised", dtype="float64", device="cpu", processes=1), None
    for states in simulate_together(setups(run, work, cases, validation)):
        expected = [evaluate(state).predictions for state in states]
        made = evaluation._with_new_localized(states, made or expected)
        given = map(evaluation._with_copied_numbers, made)
        for found, wanted in zip(map(evaluation.predict_held_back, states, given), expected, strict=True):
            assert (found.validation is None) == (wanted.validation is None) == (validation == 0)
            both = [(found, wanted)] if validation == 0 else [(found, wanted), (found.validation, wanted.validation)]
            for a, b in both:
                torch.testing.assert_close(a.personal, b.personal, rtol=0, atol=1e-12)
                if b.localized is not None:
                    torch.testing.assert_close(a.localized, b.localized, rtol=0, atol=1e-12)


def test_models_that_did_not_change_are_not_asked_again(monkeypatch):
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    (setup,) = setups(run, cases=CASES[:1], validation=3)
    *_, before, after = simulate(setup)
    earlier, asked = evaluate(before).predictions, []
    monkeypatch.setattr(evaluation, "own_models", lambda s, some, *rest: asked.extend(some) or own(s, some, *rest))
    evaluate(after, earlier)
    active = np.flatnonzero(after.active_rounds != before.active_rounds).tolist()
    assert 0 < len(active) < setup.terms.devices
    assert asked == active * 2  # for the tests, then for the validation samples


def test_a_cpu_takes_no_more_side_by_side_than_its_caches_hold(monkeypatch):
    run = config.Run(executor="vectorised", processes=2, device="cpu")
    made = setups(run, cases=CASES[:4])  # 2, 3, 4 and 2 active devices: 6 for one of two processes
    monkeypatch.setattr("fedcpsl.simulation.tuning.CACHES", 5 * 4 * made[0].terms.method.network.initial.numel() * 6)
    assert slots_that_fit(made) == 0
    monkeypatch.setattr("fedcpsl.simulation.tuning.CACHES", 5 * 4 * made[0].terms.method.network.initial.numel() * 4)
    assert slots_that_fit(made) == 4
    assert slots_that_fit(made[:1]) == 0


def test_localized_models_are_examined_a_few_at_a_time(monkeypatch):
    run = config.Run(executor="vectorised", dtype="float64", processes=1, device="cpu")
    *_, before, after = simulate_together(setups(run, cases=CASES[:3]))
    earlier = [evaluate(state).predictions for state in before]
    asked = []
    network = type(after[0].setup.terms.method.network)
    whole = network.log_probabilities
    monkeypatch.setattr(network, "log_probabilities", lambda *given: asked.append(len(given[1])) or whole(*given))
    monkeypatch.setattr(evaluation, "ROWS_SIDE_BY_SIDE", 2 * max(np.diff(s.setup.data.test.start).max() for s in after))
    anew = evaluation._with_new_localized(after, earlier)
    assert len(asked) > 1
    assert max(asked) == 2
    for state, made in zip(after, anew, strict=True):
        torch.testing.assert_close(made.localized, evaluate(state).predictions.localized, rtol=0, atol=1e-12)
