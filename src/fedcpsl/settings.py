"""The kinds of settings: what values each accepts, and how that is said. Nothing here imports torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any

from fedcpsl.errors import printable


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def setting_of(default: Any, help: str, accepts: str, test: Callable[[Any], bool], choices: Sequence[str] = ()) -> Any:
    metadata = {"help": help, "accepts": accepts, "test": test, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _is_real(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def real(
    default: Any, help: str, low: float, high: float = inf, *, open_ends: str = "", also: Sequence[str] = ()
) -> Any:
    """A number from `low` to `high`; `open_ends` has "[" or "]" where the end itself is excluded."""

    def test(value: Any) -> bool:
        return value in also if isinstance(value, str) else _is_real(value) and _inside(value, low, high, open_ends)

    return setting_of(default, help, _or(_interval(low, high, open_ends), also), test)


def _inside(value: float, low: float, high: float, open_ends: str) -> bool:
    return low <= value <= high and not ("[" in open_ends and value == low) and not ("]" in open_ends and value == high)


def _interval(low: float, high: float, open_ends: str) -> str:
    if high == inf:
        return f"a number {'above' if '[' in open_ends else 'of at least'} {low:g}"
    excluded = [f"{end:g}" for end, mark in ((low, "["), (high, "]")) if mark in open_ends]
    return f"a number from {low:g} to {high:g}" + (f", {' and '.join(excluded)} excluded" if excluded else "")


def whole(default: Any, help: str, low: int, *, also: Sequence[str] = ()) -> Any:
    def test(value: Any) -> bool:
        return value in also if isinstance(value, str) else _is_whole(value) and value >= low

    return setting_of(default, help, _or(f"a whole number of at least {low}", also), test)


def choice(default: Any, help: str, *choices: Any) -> Any:
    def test(value: Any) -> bool:
        return any(value == choice and type(value) is type(choice) for choice in choices)

    words = [choice if isinstance(choice, str) else toml_value(choice) for choice in choices]
    return setting_of(default, help, "one of " + ", ".join(map(toml_value, choices)), test, words)


def text(default: str, help: str) -> Any:
    return setting_of(default, help, "text in quotes", lambda value: isinstance(value, str))


def _or(accepts: str, also: Sequence[str]) -> str:
    return " or ".join([accepts, *map(toml_value, also)])


def is_share_or_list(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(_is_real(v) and 0 <= v <= 1 for v in numbers)


def is_labelled_share(value: Any) -> bool:
    if isinstance(value, list):
        return is_share_or_list(value) and any(value)
    return value == "auto" or (_is_real(value) and 0 < value <= 1)


def is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)) and 1 <= value[0] <= value[1]


def is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(v) and v >= 1 for v in value)


Numbers = float | list[float]
AUTO = "auto"
SEARCH = "search"
PUBLISHED_TESTS = "published"
ALGORITHM_FOLDERS = "FEDCPSL_ALGORITHMS"  # the variable that names folders of further algorithms, separated as in PATH
DEFAULT_ALGORITHM = "fedcpsl2"  # of a new run, classifier or server that names none
UNNAMED_ALGORITHM = "fedcpsl"  # of a saved file that names none: a run's config, a study, a server's job; never changes
FAMILY = ("fedcpsl", "fedshvr", "fedshvrp", "apfl", "apfsl", "fedavg", "scaffold", "local", "local-pseudo")


@dataclass(frozen=True)
class Data:
    """Where the samples come from, and which device holds each."""

    dataset: str = text(
        "digits", "digits (ships with scikit-learn), mnist, fashion-mnist, cifar10, har, synthetic; own: data.file"
    )
    file: str = text("", "your own data: an .npz, .csv, .tsv or .parquet file, or a folder device/label/*.png")
    dir: str = text("", "folder where data sets are looked for before they are downloaded; FEDCPSL_DATA by default")
    label: str = text("", "the column of a table that is the label; empty there means unlabelled")
    device_column: str = text("", "the column of a table that says which device holds the row")
    test_column: str = text("", "the column of a table that marks test rows with 1 or true")
    drop: str = text("", "columns of a table to leave out, separated by commas; #2 is the second")
    missing_labels: str = choice(
        "unlabelled", "labels such as NA, null, none, ? and unknown: no label, or a class", "unlabelled", "class"
    )
    image_size: int = whole(
        0,
        "pixels a side to which the images of a folder are scaled, oblong ones by their middle; 0: as they are",
        0,
    )
    devices: int = whole(20, "number of devices among which data without devices of its own is divided", 1)
    partition: str = choice(
        AUTO,
        "how samples are divided among devices: by distinct classes, in shards, with dirichlet shares, in unequal "
        "quantity, iid, or as in the data (natural)",
        AUTO,
        "classes",
        "shards",
        "dirichlet",
        "quantity",
        "iid",
        "natural",
    )
    classes_per_device: int = whole(2, 'distinct classes that each device holds (partition "classes")', 1)
    shards_per_device: int = whole(2, 'shards per device (partition "shards")', 1)
    concentration: float = real(
        0.5,
        'how even the shares are: the smaller, the more uneven (partition "dirichlet" and "quantity")',
        0,
        open_ends="[",
    )
    split: str = text("", "a split saved by `fedcpsl data --save`, to use again instead of drawing one")
    labelled: Numbers | str = setting_of(
        AUTO,
        "share of the training labels that devices may see, one number or one per device; auto: 0.1, own data: all",
        'a number from 0 to 1, 0 excluded, a list with one per device, or "auto"',
        is_labelled_share,
    )
    labelled_by: str = choice(
        "device", "whether that share is of each device's labels, or of the labels of all devices", "device", "overall"
    )
    stratified: bool = choice(False, "keep the same share of labels of every class", True, False)
    labelled_devices: int | str = whole("all", "number of devices, drawn at random, that have labels", 1, also=("all",))
    test: float | str = real(
        0.2,
        "share of each device's samples with known class that is its test set, unless the data marks tests itself; "
        "published: the test images of mnist, fashion-mnist or cifar10, divided among devices as the training images",
        0,
        1,
        open_ends="[]",
        also=(PUBLISHED_TESTS,),
    )
    foreign_test: float = real(
        0.0,
        "share of each device's test set that is exchanged with other devices: tests unlike its training data",
        0,
        1,
    )
    validation: float = real(
        0.0, "share of each device's remaining samples that is kept for choosing settings", 0, 1, open_ends="]"
    )
    server: float = real(
        0.0,
        "share of each device's remaining samples that the server holds, with labels, in place of the device; only "
        "semipfl uses them",
        0,
        1,
        open_ends="]",
    )
    axes: str = text(
        AUTO, "channels of windows that are a sensor's x, y and z, as in 0 1 2, 3 4 5, for views; auto: those of har"
    )
    normalise: str = choice(
        AUTO, "subtract the training data's mean and divide by its standard deviation", AUTO, "standard", "none"
    )

    @property
    def test_share(self) -> float:
        """The share of a device's samples that is drawn as its test set; 0 where the tests are published."""
        return 0.0 if isinstance(self.test, str) else self.test

    @property
    def reads(self) -> tuple[Any, ...]:
        """The settings that decide which samples are read; the others say how these are divided among devices."""
        named = (self.dataset, self.file, self.dir, self.label, self.device_column, self.test_column)
        as_read = (self.drop, self.missing_labels, self.image_size, self.axes)
        return *named, *as_read, self.test == PUBLISHED_TESTS

    @property
    def title(self) -> str:
        """What people call the samples: the file's name, or the data set's."""
        return printable(Path(self.file).name) if self.file else self.dataset


@dataclass(frozen=True)
class Model:
    """The network that every device trains."""

    name: str = text(
        AUTO, "mlp, cnn, resnet8, cnn1d, logistic; auto: by data; or package.module:function of (input_shape, classes)"
    )
    hidden: list[int] = setting_of(
        [200, 200],
        "widths of the mlp's hidden layers",
        "a list of whole numbers of at least 1, such as 64,32 or [64]",
        is_sizes,
    )


@dataclass(frozen=True)
class Algorithm:
    """FedCPSL and its family: numbers, and switches that turn single parts of the method on or off."""

    name: str = text(
        UNNAMED_ALGORITHM,
        "fedcpsl2; FedCPSL's family: fedcpsl, apfsl, apfl, fedshvrp, fedshvr, scaffold, fedavg, and without a server "
        "local, local-pseudo; by others: ditto, pfedme, fedprox and more, see docs/algorithms.md",
    )
    beta: Numbers = setting_of(
        0.75,
        "weight of the localized model in a device's prediction; one number, or a list with one per device",
        "a number from 0 to 1, or a list of them",
        is_share_or_list,
    )
    gamma: float = real(0.8, "momentum of local steps", 0, 1, open_ends="]")
    eta: float | str = real(
        AUTO,
        "step size of the global model; auto: the paper's for mnist and cifar10, 0.05 otherwise",
        0,
        open_ends="[",
        also=(AUTO,),
    )
    eta_lc: float | str = real(
        AUTO,
        "step size of the localized model; auto: 2 eta for fedcpsl, local and local-pseudo, else eta",
        0,
        open_ends="[",
        also=(AUTO,),
    )
    eta_g: float | str = real(
        "mean_steps", "step size of the server", 0, open_ends="[", also=("mean_steps", "mean_effective_steps")
    )
    alpha_p: float = real(0.03, "weight of the pseudo-label loss", 0)
    alpha_r: float = real(0.01, "weight of the regulariser; 0 makes pseudo-labels one-hot", 0)
    pseudo_labels: str = choice("closed_form", "how pseudo-labels are renewed", "closed_form", "gradient")
    labels_from: str = choice(
        "global", "the model that makes pseudo-labels; mixture is not in the paper", "global", "mixture"
    )
    warm_up: int = whole(0, "active rounds of a device before it uses pseudo-labels; not in the paper", 0)
    eta_v: float = real(1.0, 'step size of pseudo-labels (pseudo_labels = "gradient")', 0, open_ends="[")
    unlabelled: bool | str = choice(AUTO, "use unlabelled data", AUTO, True, False)
    personal: bool | str = choice(AUTO, "keep a localized model on every device", AUTO, True, False)
    control_variates: bool | str = choice(AUTO, "correct local steps by control variates", AUTO, True, False)
    momentum: bool | str = choice(AUTO, "whether local steps have momentum", AUTO, True, False)
    normalised: bool | str = choice(AUTO, "divide updates by the effective steps", AUTO, True, False)


@dataclass(frozen=True)
class Work:
    """Which devices take part in a round, and how many local steps each takes."""

    rounds: int = whole(100, "communication rounds", 1)
    active: int | str = whole(
        AUTO, "devices drawn in each round; auto: 4, and all of them for fedshvr", 1, also=(AUTO,)
    )
    unit: str = choice(
        "epochs",
        "unit of `amount`; hlu (heterogeneous local updates) draws a number of epochs for each device and round",
        "epochs",
        "steps",
        "hlu",
    )
    amount: int = whole(2, "local epochs or steps of an active device", 1)
    hlu: list[int] = setting_of(
        [1, 5], "the range that hlu draws epochs from", "two whole numbers, the smaller first", is_range
    )
    matched_steps: bool = choice(
        True,
        "equal steps for every algorithm: an epoch is a pass over all of a device's samples; false: over those that "
        "the algorithm uses",
        True,
        False,
    )
    personal_rounds: int = whole(
        0, "further rounds at the end, in which every device trains only its own model and sends nothing", 0
    )
    two_phase: bool = choice(
        False, "train localized models only in the personal rounds, from the initial weights", True, False
    )
    batch_labelled: int = whole(32, "labelled samples in a minibatch", 1)
    batch_unlabelled: int = whole(32, "unlabelled samples in a minibatch", 1)
    loss_rate: float = real(0.0, "probability that an upload is lost on its way", 0, 1)
    joiners: int = whole(0, "number of devices (the last ones) that join late", 0)
    join_round: int = whole(1, "the round after which the joiners join", 1)


@dataclass(frozen=True)
class Run:
    """How a run is computed, and what is saved."""

    seed: int = whole(0, "seed of all random choices: split, initial weights, active devices, minibatches", 0)
    executor: str = choice(
        AUTO,
        "compute devices one after another, or side by side in one program; auto: side by side where it is faster",
        AUTO,
        "sequential",
        "vectorised",
    )
    slots: int = whole(
        0, "maximum number of devices side by side; 0: all active ones, or as many as executor auto finds fastest", 0
    )
    processes: int | str = whole(
        AUTO,
        "processes that share a round's devices; auto: one per core on Linux, 1 where there is a GPU",
        1,
        also=(AUTO,),
    )
    store: str = choice(
        AUTO,
        "where device states are kept; auto: on the accelerator if all fit, else in memory or on disk",
        AUTO,
        "accelerator",
        "host",
        "disk",
    )
    device: str = text(AUTO, "cpu, cuda, cuda:1, ...; auto: cuda where there is one, else cpu")
    dtype: str = choice("float32", "floating-point type", "float32", "float64")
    precision: str = choice(
        "ieee",
        "how a GPU multiplies float32 numbers: in full precision, or faster and less precisely",
        "ieee",
        "tf32",
        "bf16",
    )
    gaps: bool = choice(False, "log the optimality gaps of the theory at every evaluation (slow)", True, False)
    evaluate_every: int = whole(1, "rounds between evaluations", 1)
    evaluate_devices: int | str = whole(
        AUTO,
        "devices that are tested, evenly spread; 0: all; auto: all, or 100 where samples are made on demand",
        0,
        also=(AUTO,),
    )
    checkpoint_seconds: float = real(30.0, "seconds between checkpoints; 0: one after every round", 0)
    keep: str = choice(
        "models", "what a finished run keeps: its models and last checkpoint too, or only metrics", "models", "metrics"
    )
    together: int = whole(0, "maximum number of runs of a comparison side by side; 0: as many as fit into memory", 0)
