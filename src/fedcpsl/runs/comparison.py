"""Comparisons of algorithms or settings over seeds: their plans and summaries. Every run has its own folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import product
from math import sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fedcpsl.config import (
    Config,
    algorithm_settings,
    other_algorithm_settings,
    read_config,
    read_own_config,
    setting,
    to_toml,
    with_settings,
)
from fedcpsl.edge.settings import FILES as EDGE_FILES
from fedcpsl.errors import InputError, RefusedError, did_you_mean
from fedcpsl.runs import folder as run_folders
from fedcpsl.settings import AUTO
from fedcpsl.storage import new_folder, parse_json, read_json, sha256_of, to_json, write_whole

PLAN = "comparison.json"


class Case(NamedTuple):
    """One case of a comparison: its name and its settings."""

    name: str
    settings: dict[str, Any]


class Plan(NamedTuple):
    """The runs of a comparison: every case with every seed. Runs of one seed share split, devices and samples."""

    kind: str  # "compare" or "sweep"
    base: Config
    cases: list[Case]
    seeds: list[int]
    reach: list[float]  # accuracies whose first round is reported


Interval = dict[str, float | None]  # mean over seeds, and half_width of its 95 % interval (None from one seed)


def compare_plan(
    base: Config,
    algorithms: Sequence[str],
    seeds: int,
    reach: Sequence[float],
    own: Mapping[str, Any] = MappingProxyType({}),
) -> Plan:
    """Make the plan of a comparison of algorithms; the others are compared with the first.

    `own` are settings that only some of them have: each gets those that it has.
    """
    from fedcpsl.algorithms import traits_of

    twice = [name for i, name in enumerate(algorithms) if name in algorithms[:i]]
    if twice:
        raise InputError(f"--algorithms: {twice[0]!r} is given twice")
    cases = []
    for name in algorithms:
        everyone = {"work.active": AUTO} if traits_of(name).everyone else {}
        has = {f"algorithm.{f.name}" for f in fields(algorithm_settings(name))}
        cases.append(Case(name, {"algorithm.name": name} | everyone | {k: v for k, v in own.items() if k in has}))
    unknown = [key for key in own if not any(key in case.settings for case in cases)]
    if unknown:
        raise InputError(f"{unknown[0]}: none of these algorithms has such a setting; leave it out")
    return _plan("compare", base, cases, seeds, reach)


def sweep_plan(base: Config, grid: Mapping[str, Sequence[Any]], seeds: int, reach: Sequence[float]) -> Plan:
    """Make the plan of a sweep: every combination of the values of some settings."""
    cases = []
    for values in product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        cases.append(Case(", ".join(f"{key.partition('.')[2]}={value}" for key, value in chosen.items()), chosen))
    return _plan("sweep", base, cases, seeds, reach)


def _plan(kind: str, base: Config, cases: list[Case], seeds: int, reach: Sequence[float]) -> Plan:
    from fedcpsl.runs.experiment import with_absolute_files, with_absolute_paths

    base = replace(base, data=with_absolute_paths(base.data), edge=with_absolute_files(base.edge))
    cases = [
        Case(case.name, {key: _absolute_path(key, value) for key, value in case.settings.items()}) for case in cases
    ]
    for case in cases:
        with_settings(base, case.settings)  # reports an invalid value before anything is run
    folders = [run_folder(Path(), case, 0).name for case in cases]
    twice = [case.name for i, case in enumerate(cases) if folders[i] in folders[:i]]
    if twice:
        raise InputError(f"{twice[0]}: two cases of that name; give each value once")
    first = base.run.seed
    return Plan(kind, base, cases, list(range(first, first + seeds)), list(reach))


def _absolute_path(key: str, value: Any) -> Any:
    files = ("data.file", "data.split", "data.dir", *(f"edge.{name}" for name in EDGE_FILES))
    return str(Path(value).absolute()) if key in files and value else value


class Checked(NamedTuple):
    """A plan whose cases can all be run, the first one's resolved config, and why some cases were left out."""

    plan: Plan
    config: Config
    left_out: dict[str, str]


def check_plan(plan: Plan, may_leave_out: Collection[str] = ()) -> Checked:
    """Build the cases once, so that errors come before any run; those that need not fit may be left out instead.

    Points of a sweep that are refused stay, to be marked as failed, so long as one can be run.
    """
    from fedcpsl.runs.experiment import Experiment, build, load_data, without_search

    only_numbers = {
        f"algorithm.{name}" for name in ("eta", "eta_lc", "gamma", "alpha_p", "alpha_r", "eta_v", "warm_up")
    }
    source, first, left_out, refused = None, list[Experiment](), dict[str, str](), dict[str, str]()
    for case in plan.cases:
        if first and set(case.settings) <= only_numbers:
            continue
        config = with_settings(plan.base, case.settings)
        alike = all(key.startswith(("algorithm.", "work.")) for key in case.settings)
        try:
            shares = config.data.reads == plan.base.data.reads
            source = source or (load_data(plan.base.data) if shares else None)
            given = source if shares else None
            built = build(without_search(config), given, first if alike else ())
        except RefusedError as error:
            if plan.kind != "sweep" and case.name not in may_leave_out:
                raise
            refused[case.name] = str(error)
            continue
        except InputError as error:
            if case.name not in may_leave_out:
                raise
            left_out[case.name] = str(error)
            continue
        first = first or [built]
    if plan.kind != "sweep":
        left_out |= refused
    if not first:
        reason = next(iter((left_out | refused).values()))
        raise InputError(
            f"--grid: no point of it can be run: {reason}"
            if plan.kind == "sweep"
            else f"--algorithms: none of them fits: {reason}"
        )
    kept = [case for case in plan.cases if case.name not in left_out]
    return Checked(plan._replace(cases=kept), first[0].config, left_out)


def full_name(key: str) -> str:
    """Return section.key of a setting that is given so or by its own name."""
    if "." in key:
        setting(*key.split(".", 1))
        return key
    sections = {section: list(values) for section, values in asdict(Config()).items()}
    others = [f.name for kind in other_algorithm_settings() for f in fields(kind)]
    sections["algorithm"] = list(dict.fromkeys([*sections["algorithm"], *others]))
    owners = [section for section, names in sections.items() if key in names]
    if not owners:
        known = [name for names in sections.values() for name in names]
        raise InputError(f"--grid {key}: no such setting; {did_you_mean(key, known)}")
    if len(owners) > 1:
        raise InputError(f"--grid {key}: in several sections; give {' or '.join(f'{o}.{key}' for o in owners)}")
    return f"{owners[0]}.{key}"


def create_comparison(folder: Path, plan: Plan) -> None:
    """Create a folder with the plan. An existing folder is never changed."""
    run_folders.make_parent(folder)
    text = to_toml(plan.base)
    content = {"kind": plan.kind, "cases": [c._asdict() for c in plan.cases], "seeds": plan.seeds, "reach": plan.reach}
    content["config_sha256"] = sha256_of(text)
    try:
        with new_folder(folder) as partial:
            (partial / "runs").mkdir()
            write_whole(partial / "config.toml", text)
            plain = parse_json(to_json(content))
            write_whole(partial / PLAN, to_json(plain | {"sha256": sha256_of(to_json(plain))}, indent=2) + "\n")
    except FileExistsError:
        raise InputError(f"{folder}: exists already; give another --out, or --resume {folder}") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error.strerror}; give another --out") from error


def is_comparison(folder: Path) -> bool:
    return (folder / PLAN).is_file()


def read_plan(folder: Path) -> Plan:
    """Read the plan that `create` wrote."""
    plan, _ = _read_plan(folder)
    return plan._replace(base=with_settings(Config(), read_config(folder / "config.toml")))


def read_plan_to_show(folder: Path) -> Plan:
    """Read the same, without PyTorch where its config is certainly what fedcpsl wrote."""
    plan, own = _read_plan(folder)
    return plan._replace(base=read_own_config(folder / "config.toml")) if own else read_plan(folder)


def _read_plan(folder: Path) -> tuple[Plan, bool]:
    """Read a plan but for its base config, and whether a checksum says that this is the one it was made with."""
    if not is_comparison(folder):
        raise InputError(
            f"{folder}: not a comparison's folder (it has no {PLAN}); give one that `fedcpsl compare` made"
        )
    try:
        content = read_json(folder / PLAN)
        digest = content.pop("sha256", None)
        cases = [Case(**case) for case in content["cases"]]
        plan = Plan(content["kind"], Config(), cases, content["seeds"], content["reach"])
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / PLAN}: cannot be read ({error}); was it changed by hand?") from error
    if digest not in (None, sha256_of(to_json(content))):
        raise InputError(f"{folder / PLAN}: damaged or changed by hand (its checksum does not match): restore it")
    expected, path = content.get("config_sha256"), folder / "config.toml"
    if expected is not None and path.is_file() and expected != sha256_of(path.read_bytes()):
        raise InputError(f"{path}: is not the config that this was started with: restore it")
    return plan, expected is not None


def run_folder(folder: Path, case: Case, seed: int) -> Path:
    """Return the folder of one run of a comparison."""
    safe = "".join(c if c.isalnum() or c in "=.-" else "-" for c in case.name.replace(", ", "+").replace("+", "_"))
    return folder / "runs" / f"{safe}-seed{seed}"


def summarise(folder: Path) -> dict[str, Any]:
    """Return the comparison's table as one object, from the metrics of its runs."""
    plan = read_plan_to_show(folder)
    finals: dict[str, list[dict[str, Any]]] = {}
    for case in plan.cases:
        found = [run_folder(folder, case, seed) for seed in plan.seeds]
        missing = [run for run in found if not (run_folders.is_finished(run) or run_folders.failure(run))]
        if missing:
            raise InputError(f"{missing[0]}: not finished; resume it with: fedcpsl {plan.kind} --resume {folder}")
        finals[case.name] = [final_row(run, plan.reach) for run in found]
    first = finals[plan.cases[0].name]
    cases = []
    for case in plan.cases:
        runs = finals[case.name]
        pairs = [(a["personal"], b["personal"]) for a, b in zip(runs, first, strict=True)]
        difference = [None if a is None or b is None else a - b for a, b in pairs]
        cases.append(
            {
                "name": case.name,
                "settings": case.settings,
                **{key: interval([run[key] for run in runs]) for key in SUMMARISED},
                **{key: interval([run[key] for run in runs]) for key in EDGE if all(key in run for run in runs)},
                "gradients_per_step": runs[0]["gradients_per_step"],
                "difference": None if runs is first else interval(difference),
                "reach": [reached(runs, k) for k in range(len(plan.reach))],
                "runs": runs,
            }
        )
    return {
        "comparison": str(folder),
        "kind": plan.kind,
        "data": plan.base.data.title,
        "matched_steps": plan.base.work.matched_steps,
        "seeds": plan.seeds,
        "reach": plan.reach,
        "cases": cases,
    }


EDGE = ("edge_seconds", "edge_joules")  # of runs with an edge network
SUMMARISED = ("personal", "worst_tenth", "global", "localized", "validation", "uplink_bytes", "steps", "seconds")


def final_row(run: Path, reach: Sequence[float]) -> dict[str, Any]:
    """Return one run's row: its last metrics, and when it first reached some accuracies."""
    if run_folders.failure(run):
        return no_row(run, run_folders.read_config_to_show(run).run.seed, reach) | {"failed": run_folders.failure(run)}
    final, metrics = run_folders.final_metrics(run), run_folders.read_metrics(run)
    first = [next((m for m in metrics if (m["personal"]["mean"] or 0) >= target), None) for target in reach]
    return {
        "run": str(run),
        "seed": final["seed"],
        "personal": final["personal"]["mean"],
        "worst_tenth": final["personal"]["worst_tenth"],
        **{k: final[k]["mean"] if final.get(k) else None for k in ("global", "localized", "validation")},
        "union": final.get("union"),
        "uplink_bytes": final["uplink_bytes"],
        "steps": final["steps"],
        "gradients_per_step": final["gradients_per_step"],
        **_costs_of(final),
        "seconds": final["seconds"],
        "step_size_search": run_folders.read_manifest(run).get("step_size_search"),
        "reach_rounds": [m and m["round"] for m in first],
        "reach_bytes": [m and m["uplink_bytes"] for m in first],
        **(_edge_row(final["edge"], first) if "edge" in final else {}),
    }


def _edge_row(final: Mapping[str, Any], first: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return virtual time and energy of a run with an edge network: in all, and until accuracies were reached."""

    def joules(edge: Mapping[str, Any]) -> float:
        return float(edge["compute_joules"] + edge["radio_joules"])

    return {
        "edge_seconds": final["seconds"],
        "edge_joules": joules(final),
        "reach_seconds": [m and m["edge"]["seconds"] for m in first],
        "reach_joules": [m and joules(m["edge"]) for m in first],
    }


COSTS = ("algorithm", "downlink_bytes", "device_bytes", "models_up", "models_down", "models_kept")


def _costs_of(final: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a run's devices sent, received and keep: in bytes, and in models (per active device and round)."""
    work, double = final["config"]["work"], final["config"]["run"]["dtype"] == "float64"
    model = (8 if double else 4) * (final["parameters"] or 0)
    visits = final["rounds"] * work["active"] * model if isinstance(work["active"], int) else 0
    up, down, kept = final["uplink_bytes"], final.get("downlink_bytes"), final["device_bytes"]
    per_visit = [None if total is None or not visits else total / visits for total in (up, down)]
    in_models = None if kept is None or not model else kept / model
    return dict(zip(COSTS, (final["algorithm"], down, kept, *per_visit, in_models), strict=True))


def no_row(run: Path, seed: int, reach: Sequence[float]) -> dict[str, Any]:
    """Return the row of a run that is not finished."""
    empty = dict.fromkeys(("reach_rounds", "reach_bytes"), [None] * len(reach))
    unknown = dict.fromkeys((*SUMMARISED, "union", "gradients_per_step", "step_size_search", *COSTS))
    return {"run": str(run), "seed": seed, **unknown, **empty}


def reached(runs: Sequence[Mapping[str, Any]], k: int) -> dict[str, Any]:
    """Return the number of runs that reached an accuracy, and their mean rounds and bytes until then.

    With an edge network, their mean virtual time and energy too.
    """
    reaching = [run for run in runs if run["reach_rounds"][k] is not None]
    means = [
        float(np.mean([run[key][k] for run in reaching])) if reaching else None
        for key in ("reach_rounds", "reach_bytes")
    ]
    edge = {
        name: float(np.mean([run[key][k] for run in reaching]))
        for name, key in (("seconds", "reach_seconds"), ("joules", "reach_joules"))
        if reaching and all(key in run for run in reaching)
    }
    return {"runs": len(reaching), "rounds": means[0], "uplink_bytes": means[1], **edge}


def interval(values: Sequence[float | None]) -> Interval | None:
    """Return the mean and its 95 % interval over seeds, by Student's t."""
    known = [v for v in values if v is not None]
    if len(known) < len(values) or not known:
        return None
    if len(known) == 1:
        return {"mean": known[0], "half_width": None}
    from scipy.stats import t

    spread = float(np.std(known, ddof=1)) / sqrt(len(known))
    return {"mean": float(np.mean(known)), "half_width": float(t.ppf(0.975, len(known) - 1)) * spread}
