"""Sends a run's metrics to TensorBoard, W&B or MLflow. A tracker that fails never stops a run."""

import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.config import sections_of
from fedcpsl.errors import InputError
from fedcpsl.runs.experiment import Watch
from fedcpsl.runs.folder import is_finished, read_run_config
from fedcpsl.runs.run_groups import Announce, Planned
from fedcpsl.storage import to_json, write_whole

PROJECT = "fedcpsl"  # of W&B, and the experiment of MLflow, unless the environment gives others
IDS = "tracker.json"  # by which a resumed run continues its tracker's run
Values = dict[str, float]


class Tracker(NamedTuple):
    """A run in a tracker: writes a round's values, closes at the end, and has the place where to look."""

    write: Callable[[int, Values], None]
    close: Callable[[bool], None]  # whether the run is finished
    where: str


def require(name: str) -> None:
    """Raise InputError if a tracker cannot work, before anything is run."""
    if find_spec(name) is None:
        raise InputError(f"--tracker {name}: is not installed; give: pip install 'fedcpsl[{name}]'")
    if name == "wandb" and _wandb_is_locked():
        raise InputError("--tracker wandb: not logged in; give `wandb login` first, or set WANDB_MODE=offline")


def _wandb_is_locked() -> bool:
    import wandb

    mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
    return mode == "online" and not wandb.login(prompt=False)


class Tracking(NamedTuple):
    """Functions that track runs."""

    also: Callable[[Path, Watch], Watch]  # a run's watch that calls the tracker too
    end: Callable[[], None]  # ends the trackers of all runs until now
    where: list[str]  # where to look, for every run that was tracked


@contextmanager
def tracking(name: str | None) -> Iterator[Tracking]:
    """Send the metrics of runs to a tracker; without a name, to none."""
    tracked: list[_Tracked] = []
    where: list[str] = []

    def also(folder: Path, watch: Watch) -> Watch:
        if name is None:
            return watch
        one = _Tracked(name, folder, where)
        tracked.append(one)

        def both(round: int, metrics: dict[str, Any] | None) -> None:
            watch(round, metrics)
            if metrics:
                one.write(round, metrics)

        return both

    def end() -> None:
        while tracked:
            tracked.pop(0).end()

    try:
        yield Tracking(also, end, where)
    finally:
        end()


def announcing(announce: Announce, tracked: Tracking) -> Announce:
    """Track every run of each group; the runs of earlier groups have ended."""

    def announced(group: Sequence[Planned], done: int) -> Sequence[Watch]:
        tracked.end()
        watches = announce(group, done)
        return [tracked.also(run.folder, watch) for run, watch in zip(group, watches, strict=True)]

    return announced


class _Tracked:
    """A run's tracker, opened at its first metrics and disabled at its first failure."""

    def __init__(self, name: str, folder: Path, where: list[str]) -> None:
        self._name, self._folder, self._where = name, folder, where
        self._tracker: Tracker | None = None
        self._disabled = False

    def write(self, round: int, metrics: Mapping[str, Any]) -> None:
        if self._disabled:
            return
        with self._guarded(f"round {round}"):
            if self._tracker is None:
                self._tracker = OPEN[self._name](self._folder, round)
                self._where.append(self._tracker.where)
            self._tracker.write(round, flat_values(metrics))

    def end(self) -> None:
        if self._tracker and not self._disabled:
            with self._guarded("the end"):
                self._tracker.close(is_finished(self._folder))

    @contextmanager
    def _guarded(self, when: str) -> Iterator[None]:
        """Print a tracker's first error and disable it; the run continues."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other libraries
                yield
        except Exception as error:
            self._disabled = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(
                f"fedcpsl: {self._folder}: {self._name} failed at {when} and is disabled; the run continues: {reason}",
                file=sys.stderr,
            )


def flat_values(metrics: Mapping[str, Any], before: str = "") -> Values:
    """Return every number of a line of metrics, as personal/mean; null is left out."""
    found: Values = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            found |= flat_values(value, f"{before}{key}/")
        elif isinstance(value, int | float) and key != "round":
            found[f"{before}{key}"] = float(value)
    return found


def flat_config(folder: Path) -> dict[str, Any]:
    """Return every setting of a run, as section.key."""
    sections = sections_of(read_run_config(folder))
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _known_id(folder: Path, name: str) -> str | None:
    path = folder / IDS
    found = json.loads(path.read_text(encoding="utf-8")).get(name) if path.exists() else None
    return str(found) if found else None


def _keep_id(folder: Path, name: str, value: str) -> None:
    path = folder / IDS
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_whole(path, to_json(known | {name: value}) + "\n")


def _open_tensorboard(folder: Path, round: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=round, flush_secs=5)
    if round == 0:
        settings = "\n".join(f"    {key} = {value}" for key, value in flat_config(folder).items())
        writer.add_text("config", settings, round)

    def write(round: int, values: Values) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)

    return Tracker(write, lambda _: writer.close(), f"tensorboard --logdir {folder / 'tensorboard'}")


def _open_wandb(folder: Path, round: int) -> Tracker:  # noqa: ARG001
    import wandb

    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        dir=str(folder),
        name=folder.name,
        id=_known_id(folder, "wandb"),
        config=flat_config(folder),
        resume="allow",
        reinit="create_new",  # several runs may be active
        settings=wandb.Settings(silent=True, console="off"),
    )
    _keep_id(folder, "wandb", run.id)
    where = f"wandb sync {run.settings.sync_dir}" if run.offline else str(run.url)
    return Tracker(
        lambda round, values: run.log(values, step=round),
        lambda finished: run.finish(exit_code=0 if finished else 1),
        where,
    )


def _open_mlflow(folder: Path, round: int) -> Tracker:  # noqa: ARG001
    import mlflow
    from mlflow.entities import Metric, Param

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    client = mlflow.MlflowClient()
    run_id = _known_id(folder, "mlflow") or _new_mlflow_run(client, folder)
    settings = [Param(key, str(value)[:500]) for key, value in flat_config(folder).items()]
    client.log_batch(run_id, params=settings)
    client.update_run(run_id, status="RUNNING")

    def write(round: int, values: Values) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run_id, metrics=[Metric(name, value, now, round) for name, value in values.items()])

    def close(finished: bool) -> None:
        client.set_terminated(run_id, "FINISHED" if finished else "KILLED")

    return Tracker(write, close, f"mlflow ui --backend-store-uri {mlflow.get_tracking_uri()}")


def _new_mlflow_run(client: Any, folder: Path) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    run_id = str(client.create_run(number, run_name=folder.name).info.run_id)
    _keep_id(folder, "mlflow", run_id)
    return run_id


OPEN: dict[str, Callable[[Path, int], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}
