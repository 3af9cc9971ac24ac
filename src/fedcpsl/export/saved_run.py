"""One device's model, or the global one, from a run's folder."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcpsl.algorithm import Algorithm, Method
from fedcpsl.algorithms import traits_of
from fedcpsl.config import Config
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.sources import load_federation
from fedcpsl.engine import Network
from fedcpsl.errors import InputError, RunError, did_you_mean
from fedcpsl.export.graph import PersonalModel, numbers_for, predict_of, with_tensors
from fedcpsl.export.model_manifest import GLOBAL, About, Predictor, shared_config
from fedcpsl.methods import hyper_of_device, resolved
from fedcpsl.models import make_model
from fedcpsl.runs.folder import is_finished, read_manifest, read_run_config
from fedcpsl.runs.result_tables import read_device_table
from fedcpsl.schedule import stream
from fedcpsl.settings import AUTO, Run, Work
from fedcpsl.simulation.device_data import normalise
from fedcpsl.storage import load_tensors
from fedcpsl.trees import Tree

ROWS_AT_ONCE = 4096
LISTED = 30  # names in an error


class Kept(NamedTuple):
    """What a run has kept."""

    folder: Path
    config: Config
    tensors: dict[str, Tensor]
    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of one input
    features: tuple[str, ...]
    scaling: Scaling | None
    digest: str  # of the data
    devices: int  # in the run

    @property
    def has_own_models(self) -> bool:
        """Whether devices have models of their own."""
        return any("/localized/" in name for name in self.tensors)

    @property
    def model(self) -> nn.Module:
        """The network as it was made, with whatever in it is not trained."""
        model = self.config.model
        torch.manual_seed(int(stream(self.config.run.seed, "init").integers(2**63)))
        made = make_model(model.name, model.hidden, self.shape, len(self.classes))
        return with_tensors(made, self.under("fixed/"))

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors of one model, under the network's own names."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


class Chosen(NamedTuple):
    """A run's model of one device: what is exported, and the run's own answers."""

    about: About
    module: PersonalModel
    predictor: Predictor


def read_kept(folder: Path) -> Kept:
    """A finished run's models with what they are for."""
    if (folder / "comparison.json").is_file():
        runs = sorted(folder.glob("*/*/config.toml"))
        raise InputError(f"{folder}: holds many runs; give one of them, such as {runs[0].parent if runs else folder}")
    config, manifest, path = read_run_config(folder), read_manifest(folder), folder / "models.safetensors"
    if not path.is_file():
        if not is_finished(folder):
            raise InputError(f"{folder}: is not finished; go on with: fedcpsl run --resume {folder}")
        raise InputError(
            f'{folder}: has no models: it was run with run.keep = "{config.run.keep}"; '
            "run it again with --set run.keep=models"
        )
    try:
        tensors, numbers = load_tensors(path)
    except RunError as error:
        raise RunError(
            f"{str(error).partition('; ')[0]}; run it again: fedcpsl run {folder / 'config.toml'}"
        ) from error
    scaling = None
    if "input/shift" in tensors:
        scaling = Scaling(tensors["input/shift"].numpy(), tensors["input/scale"].numpy())
    digest = str(manifest["split_sha256"])
    described = manifest if "class_names" in manifest else _described(config, digest, folder)
    names = ("class_names", "input_shape", "features")
    classes, shape, features = (tuple(described[name]) for name in names)
    return Kept(folder, config, tensors, classes, shape, features, scaling, digest, numbers["devices"])


def _described(config: Config, digest: str, folder: Path) -> dict[str, Any]:
    """What earlier versions left out of the manifest, from the data."""
    federation = load_federation(config.data, config.run.seed)
    if federation.digest != digest:
        raise InputError(f"{folder}: the data has changed since the run, so its classes are not known; run it again")
    names = federation.class_names or tuple(map(str, range(federation.classes)))
    return {"class_names": names, "input_shape": federation.shape, "features": federation.features}


def choose(kept: Kept, device: str | None) -> Chosen:
    """The model of a device, by name or number, or "global"; without a name, of the only device."""
    alone = traits_of(kept.config.algorithm.name).alone
    number, name = (None, GLOBAL) if device == GLOBAL else find_device(kept, device)
    if device == GLOBAL and GLOBAL in device_names(kept):
        raise InputError(f"--device {GLOBAL}: is a device of {kept.folder} too; rename it in the data and run again")
    if alone and number is None:
        raise InputError(f"{kept.folder}: {kept.config.algorithm.name} has no global model; give --device NAME")
    localized: dict[str, Tensor] = {}
    if number is not None and kept.has_own_models:
        localized = kept.under(f"device{number}/localized/")
        if not localized:
            raise _never_active(kept, name)
    general = {} if alone else kept.under("global/")
    model = kept.model
    answers = answering(kept, model, number)
    mixes = number is not None and general and localized
    about = about_of(kept, name, number, answers.numbers.get("beta") if mixes else None)
    thetas = [_theta(answers.method, named) if named else None for named in (general, localized)]
    modules = [with_tensors(model, named) if named else None for named in (general, localized)]

    def answer(x: NDArray[Any]) -> NDArray[np.float32]:
        return _probabilities(answers, kept.scaling, thetas[0], thetas[1], x)

    predict = predict_of(answers.algorithm, answers.method)
    module = PersonalModel(predict, modules[0], modules[1], answers.numbers if mixes else {}, kept.scaling)
    return Chosen(about, module, Predictor(about, answer))


class Answering(NamedTuple):
    """What a device's answer is made with, its models aside."""

    algorithm: Algorithm
    method: Method
    hyper: Tree
    numbers: dict[str, float]  # those of `hyper` that predictions need


def answering(kept: Kept, model: nn.Module, number: int | None) -> Answering:
    """The run's functions for one device; they need no samples."""
    settings, work = kept.config.algorithm, kept.config.work
    dtype = torch.float64 if kept.config.run.dtype == "float64" else torch.float32
    network = Network(model, torch.zeros(2, *kept.shape, dtype=dtype), len(kept.classes))
    found = resolved(settings, network, work)
    method = found.kept_method(work)
    hyper = hyper_of_device(found.algorithm, method, settings, kept.devices, number or 0)
    return Answering(found.algorithm, method, hyper, numbers_for(found.algorithm, hyper))


def about_of(kept: Kept, name: str = GLOBAL, number: int | None = None, beta: float | None = None) -> About:
    """What travels with a model of the run."""
    return About(
        name,
        number,
        kept.classes,
        kept.shape,
        kept.features,
        kept.scaling,
        beta,
        kept.config.algorithm.name,
        shared_config(kept.config),
        kept.digest,
    )


def find_device(kept: Kept, device: str | None) -> tuple[int, str]:
    """The number and name of a device: by name, or by its number where no name is a number."""
    names = device_names(kept)
    if device is None:
        if len(names) > 1:
            whose = kept.config.data.device_column
            column = f", or a table with its column {whose!r}" if whose else ""
            raise InputError(f"{kept.folder}: whose model? Give --device NAME, or --device {GLOBAL}{column}")
        device = next(iter(names))
    if device in names:
        return names[device], device
    numbers = {str(number): name for name, number in names.items()}
    if device in numbers and not any(name.isdigit() for name in names):
        return int(device), numbers[device]
    if len(names) < kept.devices and device.isdigit() and int(device) < kept.devices:
        raise _never_active(kept, device)
    raise InputError(f"--device {device}: no such device in {kept.folder}; {_hint(kept, device, names)}")


def _hint(kept: Kept, device: str, names: Iterable[str]) -> str:
    """Which devices there are: the nearest name; of numbers, which have no nearest, all."""
    names = list(names)
    known = names if len(names) <= LISTED else [f"the names in {kept.folder / 'devices.csv'}"]
    if not all(name.isdecimal() for name in names):
        return did_you_mean(device, [*known, GLOBAL])
    numbers = sorted(map(int, names)) if len(names) == kept.devices else range(kept.devices)
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 > 0:
        known = [f"{first} to {last}"]
    is_number = device.removeprefix("-").isdecimal()
    return f"known: {', '.join([*known, GLOBAL])}" if is_number else did_you_mean(device, [*known, GLOBAL])


def device_names(kept: Kept) -> dict[str, int]:
    return {row["name"]: int(row["device"]) for row in read_device_table(kept.folder / "devices.csv")}


def _never_active(kept: Kept, device: str) -> InputError:
    return InputError(
        f"{kept.folder}: device {device} has never been active, so the run has no model of its own for it; "
        f"give --device {GLOBAL}"
    )


def one_device(work: Work) -> Work:
    return replace(work, active=AUTO, joiners=0)


def on_this_machine(run: Run) -> Run:
    """A run's settings without what was chosen for the machine that it ran on."""
    plain = Run()
    return replace(
        run,
        executor="sequential",
        slots=0,
        processes=1,
        store="accelerator",
        device="cpu",
        precision=plain.precision,
        gaps=False,
        evaluate_devices=plain.evaluate_devices,
    )


def _theta(method: Method, named: dict[str, Tensor]) -> Tensor:
    network = method.network
    wrong = [name for name, shape in network.shapes.items() if name not in named or named[name].shape != shape]
    if wrong or len(named) != len(network.shapes):
        what = wrong[0] if wrong else next(name for name in named if name not in network.shapes)
        raise InputError(f"the model is not the one that was trained: {what!r} differs; put the old model back")
    return network.join([named[name] for name in network.shapes]).to(network.initial)


@torch.no_grad()
def _probabilities(
    answers: Answering, scaling: Scaling | None, theta: Tensor | None, own: Tensor | None, x: NDArray[Any]
) -> NDArray[np.float32]:
    """What a device answers, by the run's own functions."""
    network, pieces = answers.method.network, []
    for some in torch.from_numpy(np.ascontiguousarray(x)).split(ROWS_AT_ONCE):
        given = some.to(network.initial)
        if scaling:
            given = normalise(given, *(torch.from_numpy(np.asarray(t)).to(given) for t in scaling))
        log_h, log_h_own = (None if t is None else network.log_probabilities(t, given) for t in (theta, own))
        one = log_h if log_h_own is None else log_h_own
        assert one is not None
        both = log_h is not None and log_h_own is not None
        pieces.append(answers.algorithm.predict(answers.method, answers.hyper, log_h, log_h_own) if both else one)
    found: NDArray[np.float32] = torch.cat(pieces).exp().to(torch.float32).numpy()
    return found
