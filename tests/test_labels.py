"""Pseudo-labels renewed for many devices side by side, as a GPU does it, against one device after another."""

import pytest
import torch

from fedcpsl.config import Config, with_settings
from fedcpsl.runs.experiment import build, load_data
from fedcpsl.simulation import executors, minibatches, simulate
from fedcpsl.simulation.round_request import Slot


@pytest.mark.parametrize("together", [minibatches.ROWS_TOGETHER, 40])  # all rows of the devices, and a few at a time
@pytest.mark.parametrize("how", ["closed_form", "gradient"])  # which needs each device's own count of samples
def test_side_by_side_or_one_after_another(monkeypatch, together, how):
    monkeypatch.setattr(minibatches, "ROWS_TOGETHER", together)
    gaps = []

    def both_ways(requests, data):
        before = data.targets.clone()
        due = [
            Slot(run, request, task)
            for run, request in enumerate(requests)
            for task in request.plan
            if minibatches.is_due(request, task)
        ]
        minibatches._renew_together(due, data)
        side_by_side = data.targets.clone()
        data.targets.copy_(before)
        minibatches.renew_labels(requests, data)
        assert len({minibatches._rows(slot).stop - minibatches._rows(slot).start for slot in due}) > 1
        assert not torch.equal(data.targets, before)
        gaps.append((data.targets - side_by_side).abs().max().item())

    monkeypatch.setattr(executors, "renew_labels", both_ways)
    settings = {"work.rounds": 2, "run.executor": "vectorised", "run.processes": 1, "run.dtype": "float64"}
    config = with_settings(Config(), settings | {"data.partition": "dirichlet", "algorithm.pseudo_labels": how})
    list(simulate(build(config, load_data(config.data), []).setup))
    assert len(gaps) == 2
    assert max(gaps) < 1e-10
