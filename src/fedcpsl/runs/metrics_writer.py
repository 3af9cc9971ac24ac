"""A run's metrics on their way to its folder."""

import time
from collections.abc import Callable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from fedcpsl.errors import RunError
from fedcpsl.evaluation import Evaluation, Pending, examiner
from fedcpsl.runs import folder as files
from fedcpsl.simulation import State
from fedcpsl.theory import gap

Watch = Callable[[int, dict[str, Any] | None], None]  # told the round, and its metrics where evaluated


class MetricsWriter:
    """The metrics of runs that go together, written a round late where that lets a GPU go on meanwhile."""

    def __init__(self, folders: Sequence[Path], watches: Sequence[Watch], gaps: bool) -> None:
        self.latest: list[Evaluation] | None = None
        self._folders, self._watches, self._gaps = folders, watches, gaps
        self._began = time.monotonic()
        self._spent = [(files.read_metrics(folder) or [{}])[-1].get("seconds", 0.0) for folder in folders]
        self._noted: tuple[Sequence[State], Pending | None] | None = None
        self._examine = examiner()

    def note(self, states: Sequence[State], *, evaluated: bool) -> None:
        """Have a round's metrics computed, and write the round before."""
        pending = self._examine(states) if evaluated else None
        self.flush()
        self._noted = states, pending
        if self._gaps or not states[0].targets.is_cuda:  # gaps look at the state itself, which the next round changes
            self.flush()

    def flush(self) -> None:
        """Append the metrics of the round noted last."""
        if self._noted is None:
            return
        (states, pending), self._noted = self._noted, None
        self.latest = pending.read() if pending else self.latest
        for i, state in enumerate(states):
            metrics = None
            if pending and self.latest:
                _stop_if_lost(self.latest[i], state.round, i)
                metrics = self._metrics(state, self.latest[i], self._spent[i])
                files.append_metrics(self._folders[i], metrics)
            self._watches[i](state.round, metrics)

    def _metrics(self, state: State, evaluation: Evaluation, spent: float) -> dict[str, Any]:
        gaps = gap(state)._asdict() if self._gaps else None
        seconds = spent + (time.monotonic() - self._began) / len(self._folders)  # its share of everybody's time
        return evaluation.metrics(state) | {"gaps": gaps, "seconds": seconds}


def _stop_if_lost(evaluation: Evaluation, round: int, run: int) -> None:
    """Weights can grow absurd and still be numbers; then no prediction is one."""
    lost = [name for name, value in evaluation.losses.items() if value is not None and not isfinite(value)]
    if lost:
        error = RunError(
            f"the loss {lost[0]} is no longer a finite number after round {round}; use a smaller algorithm.eta"
        )
        error.run = run
        raise error
