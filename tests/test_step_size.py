"""The search for a step size: on labels that it holds back, with its cost said and kept."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedcpsl import Federation, Run, Work, prepare, step_size
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.config import algorithm_settings
from fedcpsl.data.ondemand import from_function
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED
from fedcpsl.errors import InputError
from fedcpsl.report.comparison import remarks
from fedcpsl.step_size import (
    CANDIDATES,
    DEVICES,
    SearchJob,
    StepSizeSearch,
    chosen_eta,
    is_larger_worth_trying,
    labels_held_back,
    search_eta,
    search_etas,
    short_rounds,
)
from tests.command import fedcpsl as command
from tests.conftest import small_federation, small_model


def federation(devices=6, labelled=0.5):
    rng = np.random.default_rng(0)
    device, y = np.arange(40 * devices) % devices, rng.integers(0, 3, 40 * devices)
    x = rng.normal(size=(len(y), 5)) + 2 * np.eye(5)[y]
    return Federation.from_arrays(x, y, device, labelled=labelled)


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


def tried(found):
    """The candidates that a search has tried: up to the first that diverges or is much worse than the best."""
    so_far = {}
    for eta in CANDIDATES:
        so_far[eta] = found.losses[eta]
        if not is_larger_worth_trying(so_far, eta):
            break
    return list(so_far)


class Steep(torch.nn.Module):
    """Whose outputs grow with the fourth power of its weights: large steps end in numbers that are not finite."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3, 5), 1.0))

    def forward(self, x):
        return x @ (self.weight**5).T


WORK = Work(rounds=20, active=2, unit="steps", amount=4, batch_labelled=8, batch_unlabelled=8)
RUN = Run(device="cpu", processes=1)


def test_some_labels_are_held_back_and_tests_are_not_looked_at():
    whole = federation()
    held = labels_held_back(whole, 0)
    before, after = whole.counts, held.counts
    assert (after[:, TEST] == before[:, LABELLED] // 5).all()
    assert (after[:, LABELLED] + after[:, TEST] == before[:, LABELLED]).all()
    assert (after[:, UNLABELLED] == before[:, UNLABELLED]).all()
    own_tests = {tuple(row) for row in whole.x[whole.role == TEST]}
    assert not own_tests & {tuple(row) for row in held.x}
    assert labels_held_back(federation(devices=DEVICES + 3), 0).devices == DEVICES
    assert np.array_equal(labels_held_back(whole, 0).x, held.x)
    assert not np.array_equal(labels_held_back(whole, 1).role, held.role)


def test_windows_keep_their_recordings():
    rng = np.random.default_rng(0)
    y, device = rng.integers(0, 2, 60), np.arange(60) // 30
    x = np.arange(60.0)[:, None] + np.zeros((1, 3))
    whole = Federation.from_arrays(x, y, device, labelled=0.5, recording=np.arange(60) // 10)
    held = labels_held_back(whole, 0)
    assert np.array_equal(held.recording, held.x[:, 0] // 10)
    assert [sum(own) for own in held.recordings] == held.counts[:, UNLABELLED].tolist()


def test_a_device_keeps_its_last_label():
    rng = np.random.default_rng(0)
    y = np.where(np.arange(40) % 2, -1, 0)
    y[[0, 2]] = 1
    device = np.arange(40) // 20
    y[21:] = -1  # the second device has one label
    tests = np.zeros(40, bool)
    held = labels_held_back(Federation.from_arrays(rng.normal(size=(40, 2)), y, device, tests), 0)
    assert held.counts[:, LABELLED].min() == 1


def test_without_labels_to_hold_back():
    y = np.full(20, -1)
    y[0] = 0
    y[10] = 1
    alone = Federation.from_arrays(np.random.default_rng(0).normal(size=(20, 2)), y, np.arange(20) // 10, np.zeros(20))
    with pytest.raises(InputError, match="two labels or more"):
        labels_held_back(alone, 0)
    found = search_eta(alone, torch.nn.Linear(2, 2), fedcpsl2.Settings(), WORK, RUN)
    assert (found.eta, found.steps) == (0.05, 0)  # as without a search, and it says so
    assert "not searched" in str(found)


def test_it_chooses_what_learns_and_leaves_out_what_diverges():
    found = search_eta(federation(), model(), fedcpsl2.Settings(), WORK, RUN)
    assert found.eta in CANDIDATES
    assert found.steps == len(tried(found)) * found.rounds * 2 * 4
    assert found.rounds == 20  # visits are short: as many rounds as the run has
    again = search_eta(federation(), model(), fedcpsl2.Settings(), WORK, RUN)
    assert (again.eta, again.losses) == (found.eta, found.losses)

    steep = search_eta(federation(), Steep(), fedcpsl2.Settings(), WORK, RUN)
    assert steep.losses[max(CANDIDATES)] == float("inf")
    assert steep.losses[tried(steep)[-1]] == float("inf")  # it diverged, and took as many steps as the others
    assert steep.steps == len(tried(steep)) * steep.rounds * 2 * 4
    assert steep.summary["losses"][f"{max(CANDIDATES):g}"] is None


def test_searches_side_by_side_find_what_each_finds_alone():
    """Also beside a run that diverges, one without labels to hold back, other rounds and other algorithms."""
    run, few = replace(RUN, dtype="float64"), replace(WORK, rounds=6)
    own = fedcpsl2.Settings()
    others = [replace(own, name="fedcpsl2-alone"), replace(own, beta=0.0, prior="off")]
    y = np.full(20, -1)
    y[[0, 10]] = 0, 1
    bare = Federation.from_arrays(np.random.default_rng(0).normal(size=(20, 5)), y, np.arange(20) // 10, np.zeros(20))
    steep, shared = Steep(), federation()
    jobs = [
        SearchJob(shared, steep, own, WORK, run),
        SearchJob(shared, steep, others[0], WORK, run),
        SearchJob(bare, steep, own, WORK, run),
        SearchJob(federation(labelled=0.25), steep, others[1], few, replace(run, seed=3)),
        SearchJob(shared, steep, own, WORK, replace(run, seed=1)),
    ]
    together = search_etas(jobs)
    for found, job in zip(together, jobs, strict=True):
        alone = search_eta(*job)
        assert (found.eta, found.rounds, found.steps) == (alone.eta, alone.rounds, alone.steps)
        assert found.losses == pytest.approx(alone.losses, abs=1e-10)
    assert together[0].losses[tried(together[0])[-1]] == float("inf")
    assert not together[2].losses


def test_one_search_at_a_time_where_memory_is_short(monkeypatch):
    jobs = [SearchJob(federation(), model(), fedcpsl2.Settings(), replace(WORK, rounds=3), RUN)] * 3
    sizes, search = [], step_size._search_side_by_side
    monkeypatch.setattr(step_size, "_search_side_by_side", lambda some: sizes.append(len(some)) or search(some))
    search_etas(jobs)
    monkeypatch.setattr(step_size, "free_bytes", lambda _: 100)
    search_etas(jobs)
    assert sizes == [3, 1, 1, 1]


def test_a_server_keeps_its_own_samples_in_a_search():
    held = labels_held_back(small_federation(sizes=((5, 5), (6, 7)), at_server=9), 0)
    assert len(held.server_samples) == 9
    search_eta(
        small_federation(sizes=((5, 5), (6, 7)), at_server=9),
        small_model(),
        algorithm_settings("semipfl")(name="semipfl"),
        replace(WORK, rounds=2),
        RUN,
    )


def test_the_choice():
    def choose(*losses):
        return chosen_eta(dict(zip(CANDIDATES, losses, strict=True)))

    no = float("inf")
    assert CANDIDATES == (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    assert choose(0.6, 0.5, 0.4, 0.3, 0.2, no) == 0.1  # 0.3 is the last before divergence
    assert choose(0.6, 0.5, 0.4, 0.3, 0.2, 1.7) == 0.1  # or before what is much worse
    assert choose(0.6, 0.5, 0.4, 0.6, 0.9, no) == 0.03  # worse, not nearly as good
    assert choose(0.5, 0.6, 0.55, 0.4, no, no) == 0.03  # nearly as good, and larger
    assert choose(0.7, 0.6, no, no, no, no) == 0.003
    assert choose(1.5, 1.4, 1.2, 0.2, 0.6, no) == 0.055  # a whole margin would cost too much: sqrt(0.03 x 0.1)
    assert choose(1.5, 1.5, 1.3, 0.4, 0.1, no) == 0.17
    assert choose(0.5, no, no, no, no, no) == 0.003
    assert choose(0.6, 0.5, 0.4, 0.3, 0.2, 0.1) == 0.3
    with pytest.raises(InputError, match="no step size of"):
        choose(*[no] * 6)


def test_rounds_of_a_search():
    settings = fedcpsl2.Settings()
    assert short_rounds(federation().sizes, settings, WORK, 2) == 20
    assert short_rounds(federation().sizes, settings, replace(WORK, rounds=1000), 2) == 75  # 600 steps of 8 a round
    assert short_rounds(federation().sizes, settings, replace(WORK, amount=500), 2) == 5
    assert short_rounds(federation().sizes, settings, replace(WORK, rounds=3), 2) == 3


def test_prepare_searches_by_default():
    setup = prepare(federation(), model(), fedcpsl2.Settings(), WORK, RUN)
    assert setup.terms.numbers[0, 0] == search_eta(federation(), model(), fedcpsl2.Settings(), WORK, RUN).eta


@pytest.mark.parametrize("given", ["fedavg", WORK])
def test_prepare_names_what_is_no_algorithm(given):
    with pytest.raises(InputError, match=r"the third argument is .*; give the settings of an algorithm"):
        prepare(federation(), model(), given)


def test_samples_made_on_demand():
    def make(device):
        rng = np.random.default_rng(device)
        y = rng.integers(0, 2, 30)
        return rng.normal(size=(30, 3)) + y[:, None], y

    many = from_function(make, devices=50, labelled=10, unlabelled=15, tests=5, classes=2)
    found = search_eta(many, torch.nn.Linear(3, 2), fedcpsl2.Settings(), WORK, RUN)
    assert isinstance(found, StepSizeSearch)


def test_the_command_line_says_what_it_cost(tmp_path):
    done = command("run", "--algorithm", "fedcpsl2", "--rounds", "2", "--out", "run", cwd=tmp_path)
    assert "step size " in done.stderr
    assert "local steps in all" in done.stderr
    kept = json.loads((tmp_path / "run/manifest.json").read_text())["step_size_search"]
    assert f"eta = {kept['eta']}" in (tmp_path / "run/config.toml").read_text()
    assert kept["steps"] > 0


def test_a_comparison_says_what_searches_found_and_cost():
    searches = [{"eta": 0.3, "steps": 10}, {"eta": 0.1, "steps": 20}]
    searched = {"name": "a", "steps": None, "runs": [{"step_size_search": search} for search in searches]}
    given = {"name": "b", "steps": None, "runs": [{"step_size_search": None}, {}]}
    said = remarks({"kind": "compare", "cases": [searched, given], "seeds": [0, 1]})
    assert said[0] == "step size of a: searched for each seed, 0.3, 0.1; this took 15 additional local steps per run"
    assert not any("of b" in text for text in said)
