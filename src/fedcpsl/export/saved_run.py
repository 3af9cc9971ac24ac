"""Models of a finished run: load its folder, select a device's model or the global one, predict with it."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcpsl.algorithm import Algorithm, Method, log_answers, optional
from fedcpsl.algorithms import traits_of
from fedcpsl.config import Config
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.sources import load_federation
from fedcpsl.engine import Network
from fedcpsl.errors import InputError, RunError, did_you_mean, printable
from fedcpsl.export.model_manifest import GLOBAL, ModelManifest, Predictor, shareable_config
from fedcpsl.export.personal_model import PersonalModel, numbers_read, predict_of, with_tensors
from fedcpsl.methods import hyper_of_device, resolved
from fedcpsl.models import make_model
from fedcpsl.runs.folder import is_finished, read_device_table, read_manifest, read_run_config
from fedcpsl.schedule import stream
from fedcpsl.settings import AUTO, Run, Work
from fedcpsl.simulation.device_data import normalise
from fedcpsl.storage import load_tensors
from fedcpsl.trees import Tree

ROWS_AT_ONCE = 4096
MAX_NAMES = 30  # in an error
MAX_UNKNOWN = 5  # unknown devices listed in a note


class SavedRun(NamedTuple):
    """The models of a finished run, and what is needed to use them."""

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
        """Return whether devices have models of their own."""
        return any("/localized/" in name for name in self.tensors)

    @property
    def model(self) -> nn.Module:
        """Return the network as initialised, with its parameters and buffers that are not trained."""
        model = self.config.model
        torch.manual_seed(int(stream(self.config.run.seed, "init").integers(2**63)))
        made = make_model(model.name, model.hidden, self.shape, len(self.classes))
        return with_tensors(made, self.under("fixed/"))

    def under(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors of one model, by their names in the network."""
        return {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}


class DeviceModel(NamedTuple):
    """A run's model of one device: what is exported, and the run's own predictions."""

    manifest: ModelManifest
    module: PersonalModel
    predictor: Predictor


def load_saved_run(folder: Path) -> SavedRun:
    """Load a finished run."""
    if (folder / "comparison.json").is_file():
        runs = sorted(folder.glob("*/*/config.toml"))
        raise InputError(
            f"{folder}: contains several runs; give one of them, such as {runs[0].parent if runs else folder}"
        )
    config, manifest, path = read_run_config(folder), read_manifest(folder), folder / "models.safetensors"
    if not path.is_file():
        if not is_finished(folder):
            raise InputError(f"{folder}: is not finished; resume with: fedcpsl run --resume {folder}")
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
    description = manifest if "class_names" in manifest else _description_from_data(config, digest, folder)
    names = ("class_names", "input_shape", "features")
    classes, shape, features = (tuple(description[name]) for name in names)
    return SavedRun(folder, config, tensors, classes, shape, features, scaling, digest, numbers["devices"])


def _description_from_data(config: Config, digest: str, folder: Path) -> dict[str, Any]:
    """Return from the data what the manifests of earlier versions lack."""
    federation = load_federation(config.data, config.run.seed)
    if federation.digest != digest:
        raise InputError(f"{folder}: the data has changed since the run, so its classes are not known; run it again")
    names = federation.class_names or tuple(map(str, range(federation.classes)))
    return {"class_names": names, "input_shape": federation.shape, "features": federation.features}


def general_tensors(run: SavedRun) -> dict[str, Tensor]:
    """Return the global model by the names of its parameters; empty where the algorithm has none."""
    return {} if traits_of(run.config.algorithm.name).alone else run.under("global/")


def model_of_device(run: SavedRun, device: str | None) -> DeviceModel:
    """Return the model of a device, by name or number, or "global"; without a name, of the only device."""
    general = general_tensors(run)
    number, name = (None, GLOBAL) if device == GLOBAL else find_device(run, device)
    if device == GLOBAL and GLOBAL in device_names(run):
        raise InputError(f"--device {GLOBAL}: is a device of {run.folder} too; rename it in the data and run again")
    if not general and number is None:
        raise InputError(f"{run.folder}: {run.config.algorithm.name} has no global model; give --device NAME")
    localized: dict[str, Tensor] = {}
    if number is not None and run.has_own_models:
        localized = run.under(f"device{number}/localized/")
        if not localized:
            raise _never_active(run, name)
    model = run.model
    bound = bind_algorithm(run, model, number)
    predict, both_ways = predict_of(bound.algorithm, bound.method), bound.method.both_ways
    numbers = numbers_read(predict, bound.hyper, len(run.classes), bool(general), bool(localized))
    mixes, beta = number is not None and general and localized, numbers.get("beta")
    manifest = manifest_of(run, name, number, beta if mixes and isinstance(beta, float) else None)
    thetas = [_theta(bound.method, named) if named else None for named in (general, localized)]
    modules = [with_tensors(model, named) if named else None for named in (general, localized)]

    def predict_samples(x: NDArray[Any]) -> NDArray[np.float32]:
        return _probabilities(bound, run.scaling, thetas[0], thetas[1], x)

    module = PersonalModel(predict, modules[0], modules[1], numbers, run.scaling, both_ways)
    return DeviceModel(manifest, module, Predictor(manifest, predict_samples))


class BoundAlgorithm(NamedTuple):
    """An algorithm with its method and a device's numbers: all that predictions need except the models."""

    algorithm: Algorithm
    method: Method
    hyper: Tree


def bind_algorithm(run: SavedRun, model: nn.Module, number: int | None) -> BoundAlgorithm:
    """Return the run's algorithm for one device; it needs no samples."""
    settings, work = run.config.algorithm, run.config.work
    dtype = torch.float64 if run.config.run.dtype == "float64" else torch.float32
    network = Network(model, torch.zeros(2, *run.shape, dtype=dtype), len(run.classes))
    found = resolved(settings, network, work)
    method = found.kept_method(work)
    hyper = hyper_of_device(found.algorithm, method, settings, run.devices, number or 0)
    if optional(found.algorithm, "predicting") and number is not None:
        needed = optional(found.algorithm, "PREDICTS_WITH")
        hyper = SimpleNamespace(**{name: run.tensors[name][number].to(network.initial) for name in needed})
    return BoundAlgorithm(found.algorithm, method, hyper)


def manifest_of(
    run: SavedRun, name: str = GLOBAL, number: int | None = None, beta: float | None = None
) -> ModelManifest:
    """Return the manifest of a model of the run."""
    return ModelManifest(
        name,
        number,
        run.classes,
        run.shape,
        run.features,
        run.scaling,
        beta,
        run.config.algorithm.name,
        shareable_config(run.config),
        run.digest,
    )


def find_device(run: SavedRun, device: str | None, *, in_table: bool = False) -> tuple[int, str]:
    """Return the number and name of a device: by name, or by its number if no name is a number.

    `in_table`: a table of samples could name their devices.
    """
    names = device_names(run)
    if device is None:
        if len(names) > 1:
            whose = run.config.data.device_column
            column = f", or a table with its column {whose!r}" if in_table and whose else ""
            raise InputError(f"{run.folder}: which device's model? Give --device NAME, or --device {GLOBAL}{column}")
        device = next(iter(names))
    if device in names:
        return names[device], device
    numbers = {str(number): name for name, number in names.items()}
    if device in numbers and not any(name.isdigit() for name in names):
        return int(device), numbers[device]
    if len(names) < run.devices and device.isdigit() and int(device) < run.devices:
        raise _never_active(run, device)
    raise InputError(f"--device {device}: no such device in {run.folder}; {_hint(run, device, names)}")


def _hint(run: SavedRun, device: str, names: Iterable[str]) -> str:
    """Return a hint at the existing devices: the nearest name, or all if names are numbers."""
    names = list(names)
    known = names if len(names) <= MAX_NAMES else [f"the names in {run.folder / 'devices.csv'}"]
    if not all(name.isdecimal() for name in names):
        return did_you_mean(device, [*known, GLOBAL])
    numbers = sorted(map(int, names)) if len(names) == run.devices else range(run.devices)
    first, last = numbers[0], numbers[-1]
    if last - first == len(numbers) - 1 > 0:
        known = [f"{first} to {last}"]
    is_number = device.removeprefix("-").isdecimal()
    return f"known: {', '.join([*known, GLOBAL])}" if is_number else did_you_mean(device, [*known, GLOBAL])


def device_names(run: SavedRun) -> dict[str, int]:
    """Return the number of every device by its name."""
    return {row["name"]: int(row["device"]) for row in read_device_table(run.folder / "devices.csv")}


def _never_active(run: SavedRun, device: str) -> InputError:
    return InputError(
        f"{run.folder}: device {device} has never been active, so the run has no model of its own for it; "
        f"give --device {GLOBAL}"
    )


def one_device(work: Work) -> Work:
    """Return a run's settings of work for a single device."""
    return replace(work, active=AUTO, joiners=0)


def on_this_machine(run: Run) -> Run:
    """Return a run's settings without those chosen for the machine that it ran on."""
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
    bound: BoundAlgorithm, scaling: Scaling | None, theta: Tensor | None, own: Tensor | None, x: NDArray[Any]
) -> NDArray[np.float32]:
    """Return the probabilities of samples by the run's own functions."""
    network, parts = bound.method.network, []
    for batch in torch.from_numpy(np.ascontiguousarray(x)).split(ROWS_AT_ONCE):
        given = batch.to(network.initial)
        if scaling:
            given = normalise(given, *(torch.from_numpy(np.asarray(t)).to(given) for t in scaling))
        both = [None if t is None else log_answers(bound.method, t, given) for t in (theta, own)]
        parts.append(bound.algorithm.predict(bound.method, bound.hyper, *both))
    found: NDArray[np.float32] = torch.cat(parts).exp().to(torch.float32).numpy()
    return found


class DevicePredictions(NamedTuple):
    """Probabilities, and the model behind each."""

    probabilities: NDArray[np.float32]  # [samples, classes]
    models: list[str]  # of each sample: its device, or "global"
    note: str  # about devices without a model of their own; empty if there are none


def predict_by_device(run: SavedRun, x: NDArray[Any], devices: list[str]) -> DevicePredictions:
    """Predict each sample by its own device's model; by the global model if the device is unknown or never trained."""
    names = device_names(run)
    models = [name if name in names and _has_model(run, names[name]) else GLOBAL for name in devices]
    unknown = sorted({device for device, model in zip(devices, models, strict=True) if model == GLOBAL})
    if unknown and not general_tensors(run):
        raise InputError(
            f"device {printable(unknown[0])!r} is not in {run.folder}, and {run.config.algorithm.name} has no "
            f"global model; {did_you_mean(unknown[0], names)}"
        )
    probabilities = np.empty((len(x), len(run.classes)), np.float32)
    of = np.array(models)
    for model in sorted(set(models)):
        probabilities[of == model] = model_of_device(run, model).predictor.predict(x[of == model])
    return DevicePredictions(probabilities, models, _note(unknown, int((of == GLOBAL).sum())))


def _has_model(run: SavedRun, number: int) -> bool:
    return not run.has_own_models or any(name.startswith(f"device{number}/localized/") for name in run.tensors)


def _note(unknown: list[str], rows: int) -> str:
    if not unknown:
        return ""
    some = ", ".join(printable(name) or "no device" for name in unknown[:MAX_UNKNOWN])
    more = f" and {len(unknown) - MAX_UNKNOWN} more" if len(unknown) > MAX_UNKNOWN else ""
    what = "row is" if rows == 1 else "rows are"
    return f"{rows} {what} of devices that the run has no model for ({some}{more}): the global model predicts them"
