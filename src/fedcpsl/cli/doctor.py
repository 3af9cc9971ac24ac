"""fedcpsl doctor: what this machine has, what is missing, and what a run would take."""

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fedcpsl.cli.options import add_settings, config_of, given_settings

if TYPE_CHECKING:
    from fedcpsl.config import Config
    from fedcpsl.runs.environment import Part
    from fedcpsl.runs.estimate import Estimate, Range
    from fedcpsl.runs.experiment import Experiment

BUSY = 0.5  # load per core above which timings are unreliable


def add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, what is missing, and the time and memory of a run",
        description="Print what this machine has and lacks, with the command that installs it. With a config or "
        "settings, also build that run, try a few of its rounds, and estimate its memory and time; exit code 1 if it "
        "would not fit, or its data set is not on this machine. Nothing is downloaded or written.",
        allow_abbrev=False,
    )
    add_settings(doctor)
    doctor.add_argument("--json", action="store_true", help="as one JSON object")
    doctor.set_defaults(command=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    config = config_of(parsed) if given_settings(parsed) else None
    from fedcpsl.runs import environment

    machine = environment.inspect_machine()
    extras, programs = environment.inspect_extras(), environment.inspect_programs()
    datasets = environment.inspect_datasets(config.data if config else None)
    gpu = environment.idle_gpu()
    missing = [part for part in (*([gpu] if gpu else []), *extras, *programs, *datasets) if part.fix]
    able = environment.able(machine, extras)
    content: dict[str, Any] = {
        "machine": machine,
        "able": able,
        "extras": [part._asdict() for part in extras],
        "programs": [part._asdict() for part in programs],
        "datasets": [part._asdict() for part in datasets],
        "missing": [part._asdict() for part in missing],
    }
    absent, estimated = (
        (None, None) if config is None else _estimate(config, datasets)
    )  # its errors come before any output
    if not parsed.json:
        _print_machine(machine)
        _print_facts("can do", able.items())
        _print_facts("data sets", ((part.name, part.found or part.purpose) for part in datasets))
        _print_facts("extras", ((part.name, part.found or f"not installed: {part.purpose}") for part in extras))
        _print_facts("programs", ((part.name, part.found or f"not found: {part.purpose}") for part in programs))
        _print_missing(missing)
    if config is None:
        return _end(content, parsed.json, 0)
    if absent:
        if not parsed.json:
            why = f"  {absent.name} is missing ({absent.purpose}), so there is no estimate; get it with:"
            print("this run", why, f"    {absent.fix}", sep="\n")
        return _end(content | {"estimate": None}, parsed.json, 1)
    assert estimated
    experiment, found = estimated
    content["estimate"] = _plain(experiment, found)
    if not parsed.json:
        _print_estimate(experiment, found, machine)
    return _end(content, parsed.json, 1 if found.lacks else 0)


def _estimate(
    config: "Config", datasets: Iterable["Part"]
) -> tuple["Part | None", "tuple[Experiment, Estimate] | None"]:
    """Return the run's data set if it is missing (nothing is downloaded), else the run and its estimate."""
    from fedcpsl.data.sources import resolve_auto
    from fedcpsl.runs.estimate import estimate

    name = resolve_auto(config.data).dataset
    absent = next((part for part in datasets if part.name == name and part.fix), None)
    return (absent, None) if absent else (None, estimate(config))


def _end(content: Mapping[str, Any], as_json: bool, code: int) -> int:
    if as_json:
        from fedcpsl.storage import to_json

        print(to_json(content, indent=2))
    return code


def _plain(experiment: "Experiment", found: "Estimate") -> dict[str, Any]:
    """Return the estimate as a dictionary, with the executor, slots and processes of the run."""
    ranges = ("seconds", "host_bytes", "accelerator_bytes")
    plain = found._asdict() | {key: value._asdict() for key in ranges if (value := getattr(found, key))}
    setup = experiment.setup
    layout = {
        "executor": setup.machine.executor,
        "slots": experiment.config.run.slots,
        "processes": setup.machine.processes,
    }
    return {"device": str(setup.data.where), "store": setup.machine.store, **layout, **plain}


def _print_facts(title: str, facts: Iterable[tuple[str, Any]]) -> None:
    facts = list(facts)
    wide = max((len(name) for name, _ in facts), default=0)
    print(title, *(f"  {name.ljust(wide)}  {fact}" for name, fact in facts), "", sep="\n")


def _print_machine(machine: Mapping[str, Any]) -> None:
    from fedcpsl.report.tables import size

    accelerators = [
        f"{a['device']}, {a['name']}" + (f", {size(a['free_bytes'])} free" if a["free_bytes"] is not None else "")
        for a in machine["accelerators"]
    ]
    total = machine["memory_bytes"]
    load = "" if machine["load"] is None else f", load {machine['load']:.1f}"
    _print_facts(
        "machine",
        [
            ("processor", f"{machine['processor']}, {machine['usable_cores']} of {machine['cores']} cores{load}"),
            ("memory", (f"{size(total)}, " if total else "") + f"{size(machine['free_memory_bytes'])} free"),
            ("GPU", "; ".join(accelerators) or "none that PyTorch can use"),
            *(("disk", f"{size(free)} free in {folder}") for folder, free in machine["disk"].items() if free),
            ("versions", f"fedcpsl {machine['fedcpsl']}, Python {machine['python']}, PyTorch {machine['torch']}"),
        ],
    )


def _print_missing(missing: Iterable["Part"]) -> None:
    """Print each missing part and, on a line of its own, the command that installs it."""
    lines = [line for part in missing for line in (f"  {part.name}: {part.purpose}", f"    {part.fix}")]
    print("missing, if you want it", *(lines or ["  nothing"]), "", sep="\n")


def _print_estimate(experiment: "Experiment", found: "Estimate", machine: Mapping[str, Any]) -> None:
    from fedcpsl.report.tables import size

    config, setup = experiment.config, experiment.setup
    places = {"accelerator": f"on {setup.data.where}", "host": "in memory", "disk": "on disk"}
    beside, layout = found.accelerator_bytes, setup.machine
    facts = [
        (
            "what",
            f"{config.algorithm.name} on {config.data.title}, {setup.terms.devices} devices, {found.rounds} rounds, "
            f"{found.steps:,} local steps, {found.parameters:,} parameters",
        ),
        (
            "how",
            f"{layout.executor} on {setup.data.where}, {layout.processes} process{'es' * (layout.processes > 1)}, "
            f"device states {places[layout.store]}",
        ),
        ("time", f"about {_duration(found.seconds.likely)} ({_between(found.seconds)}), from a trial of a few rounds"),
        ("memory", _bytes_between(found.host_bytes)),
        *([("on the GPU", _bytes_between(beside))] if beside else []),
        ("folder", f"up to {size(found.folder_bytes)}"),
    ]
    _print_facts("this run", facts)
    if machine["load"] is not None and machine["load"] > BUSY * machine["usable_cores"]:
        print("the machine is busy now: the run takes less time once it is not, and timings are rough\n")
    print("it does not fit:" if found.lacks else "it fits", *(f"  {each}" for each in found.lacks), sep="\n")


def _between(seconds: "Range") -> str:
    return f"{_duration(seconds.low)} to {_duration(seconds.high)}"


def _bytes_between(count: "Range") -> str:
    from fedcpsl.report.tables import size

    return f"about {size(round(count.likely))} ({size(round(count.low))} to {size(round(count.high))})"


def _duration(seconds: float) -> str:
    """Return a time in the unit that suits its length."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
