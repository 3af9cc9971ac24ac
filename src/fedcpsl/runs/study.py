"""Studies: a TOML file with panels, rows and optionally a grid, each case run over seeds. Studies share runs."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from fedcpsl.config import Config, flat_settings, read_config, to_toml, with_settings
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.runs.comparison import Case, Plan
from fedcpsl.runs.experiment import with_absolute_paths
from fedcpsl.runs.folder import make_parent
from fedcpsl.runs.run_groups import Announce, run_all
from fedcpsl.storage import write_whole

Settings = dict[str, Any]  # section.key to value
KEYS = {
    "title": str,
    "shows": str,
    "datasets": list,
    "bases": dict,
    "chosen": str,
    "chosen_by_panel": str,
    "seeds": int,
    "first_seed": int,
    "settings": dict,
    "panels": dict,
    "dataset_panels": dict,
    "rows": dict,
    "tuned": dict,
    "reference": str,
    "grid": dict,
    "reach": dict,
    "published": dict,
    "needs": bool,
}
CHOSEN = ("chosen", "chosen_by_panel")  # files that another study wrote
SHOWS = ("curves", "costs", "map", "trend", "rate")


class Study(NamedTuple):
    """The content of a study file."""

    name: str
    title: str
    shows: str  # curves by round, costs (by virtual time and energy), a map over a grid, a trend over panels, or a rate
    bases: dict[str, Config]  # by data set
    datasets: list[str]  # those that are run by default
    chosen: dict[str, dict[str, Settings]]  # by data set and algorithm: settings that another study selected
    seeds: int
    first_seed: int
    settings: Settings
    panels: dict[str, Settings]
    dataset_panels: dict[str, dict[str, Settings]]  # by data set, where each has its own
    rows: dict[str, Settings]
    tuned: dict[str, dict[str, dict[str, Settings]]]  # by data set, panel and row: settings that another study selected
    reference: str  # the row that the others are compared with
    grids: dict[str, dict[str, list[Any]]]  # by row
    reach: dict[str, list[float]]  # by data set: accuracies whose first round is reported
    published: dict[str, dict[str, dict[str, float]]]  # by data set, panel and row: published accuracies in %
    needs: bool  # whether tables have what each row needs: data, traffic, what devices keep
    only: dict[str, list[str]]  # by row: the data sets that it is for


class Line(NamedTuple):
    """One case of a study and its place in it."""

    panel: str
    row: str
    point: Settings  # of the row's grid
    case: Case


def studies_folder() -> Path:
    """Return the folder of the studies of fedcpsl: in the package, or in the repository that it is run from."""
    inside = Path(__file__).resolve().parents[1] / "experiments"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[3] / "experiments"


def known_studies() -> dict[str, Path]:
    """Return the studies by name: every file of every folder; their base configs are a folder deeper."""
    return {path.stem: path for path in sorted(studies_folder().glob("*/*.toml"))}


def paper_studies() -> list[str]:
    """Return the names of the studies of Section V of the paper."""
    return ["table", "beta", "momentum", "shvr", "apfl", "hlu"]


def edge_studies() -> list[str]:
    """Return the names of the studies of edge networks."""
    return ["edge-active", "edge-deadline", "edge-bandwidth", "edge-bits"]


def find_study(name: str) -> Study:
    """Return a study by its name or its file."""
    known = known_studies()
    if name not in known and not name.endswith(".toml"):
        raise InputError(f"{name}: no such study; {did_you_mean(name, known)}, or give a .toml file")
    return read_study(known.get(name, Path(name)))


def read_study(path: Path) -> Study:
    """Read a study from its file and check every setting."""
    content, flat = _toml(path), partial(flat_settings, where=str(path))
    _check_keys(path, content)
    bases = {name: with_settings(Config(), read_config(path.parent / base)) for name, base in content["bases"].items()}
    chosen, by_panel = (_toml(path.parent / content[key]) if key in content else {} for key in CHOSEN)
    rows, grids, only = {}, {}, {}
    for row, nested in content["rows"].items():
        grids[row] = flat(nested.get("grid", {})) | flat(content.get("grid", {}))
        rows[row] = flat({key: value for key, value in nested.items() if key not in ("grid", "datasets")})
        only[row] = nested.get("datasets", list(bases))
        if unknown := [name for name in only[row] if name not in bases]:
            raise InputError(f"{path}: rows.{row}.datasets: {unknown[0]!r}: {did_you_mean(unknown[0], bases)}")
    reference = content.get("reference", next(iter(rows)))
    if reference not in rows:
        raise InputError(f"{path}: reference = {reference!r}: no such row; {did_you_mean(reference, rows)}")
    return Study(
        name=path.stem,
        title=content["title"],
        shows=content.get("shows", "curves"),
        bases=bases,
        datasets=content.get("datasets", list(bases)),
        chosen={d: {a: flat(s) for a, s in of.items()} for d, of in chosen.items()},
        seeds=content.get("seeds", 5),
        first_seed=content.get("first_seed", 0),
        settings=flat(content.get("settings", {})),
        panels={name: flat(s) for name, s in content.get("panels", {"": {}}).items()},
        dataset_panels={
            d: {name: flat(s) for name, s in of.items()} for d, of in content.get("dataset_panels", {}).items()
        },
        rows=rows,
        tuned={
            d: {panel: {row: flat(s) for row, s in of.items()} for panel, of in panels.items()}
            for d, panels in _merged(by_panel, content.get("tuned", {})).items()
        },
        reference=reference,
        grids=grids,
        reach=content.get("reach", {}),
        published=content.get("published", {}),
        needs=content.get("needs", False),
        only=only,
    )


def _merged(by_panel: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by data set, panel and row, those of `over` in place of the others."""
    datasets = {*by_panel, *over}
    panels = {d: {*by_panel.get(d, {}), *over.get(d, {})} for d in datasets}
    return {d: {p: by_panel.get(d, {}).get(p, {}) | over.get(d, {}).get(p, {}) for p in panels[d]} for d in datasets}


def _check_keys(path: Path, content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key not in KEYS:
            raise InputError(f"{path}: {key}: no such key of a study; {did_you_mean(key, KEYS)}")
        if not isinstance(value, KEYS[key]):
            raise InputError(f"{path}: {key}: must be a {KEYS[key].__name__}")
    for key in ("title", "bases", "rows"):
        if not content.get(key):
            raise InputError(f"{path}: a study needs {key}")
    if content.get("shows", "curves") not in SHOWS:
        raise InputError(f"{path}: shows = {content['shows']!r}: give one of {', '.join(SHOWS)}")


def lines_of(study: Study, dataset: str) -> list[Line]:
    """Return every case of a study on one data set, panel by panel.

    Settings of a row override those of its panel, and both override the chosen ones.
    """
    base = _base(study, dataset)
    lines = []
    for panel, row in product(study.panels, study.rows):
        own = study.panels[panel] | study.rows[row] | study.tuned.get(dataset, {}).get(panel, {}).get(row, {})
        name = (study.settings | own).get("algorithm.name", base.algorithm.name)
        grid = study.grids[row]
        for values in product(*grid.values()):
            point = dict(zip(grid, values, strict=True))
            settings = study.settings | study.chosen.get(dataset, {}).get(name, {}) | own | point
            lines.append(Line(panel, row, point, _case(base, settings)))
    return lines


def on_dataset(study: Study, dataset: str) -> Study:
    """Return the study with the panels and rows of one data set, where it has its own."""
    rows = {row: settings for row, settings in study.rows.items() if dataset in study.only[row]}
    return study._replace(panels=study.dataset_panels.get(dataset, study.panels), rows=rows)


def only_some(study: Study, rows: Sequence[str], panels: Sequence[str]) -> Study:
    """Return the study with some of its rows and panels; an empty list stands for all of them.

    Where the row that others are compared with is not among them, it is the first of them.
    """
    for option, given, known in (("--rows", rows, study.rows), ("--panels", panels, study.panels)):
        for name in given:
            if name not in known:
                raise InputError(f"{option} {name}: not in the study {study.name}; {did_you_mean(name, known)}")
    kept = {name: settings for name, settings in study.rows.items() if not rows or name in rows}
    return study._replace(
        rows=kept,
        panels={name: settings for name, settings in study.panels.items() if not panels or name in panels},
        reference=study.reference if study.reference in kept else next(iter(kept)),
    )


def with_more(study: Study, settings: Mapping[str, Any]) -> Study:
    """Return the study with other settings in its base configs; those of its cases override them."""
    return study._replace(bases={name: with_settings(base, settings) for name, base in study.bases.items()})


def plan_of(studies: Sequence[Study], dataset: str, seeds: int | None = None) -> Plan:
    """Make one plan for studies with the same base and seeds; a case of several studies is run once."""
    base = _base(studies[0], dataset)
    base = replace(base, data=with_absolute_paths(base.data))
    cases = {line.case.name: line.case for study in studies for line in lines_of(study, dataset)}
    for case in cases.values():
        with_settings(base, case.settings)
    first = studies[0].first_seed
    return Plan("paper", base, list(cases.values()), [first + k for k in range(seeds or studies[0].seeds)], [])


def together(studies: Sequence[Study], dataset: str) -> list[list[Study]]:
    """Group the studies that one plan can contain."""
    groups: list[list[Study]] = []
    for study in studies:
        fits = (g for g in groups if (g[0].seeds, g[0].first_seed) == (study.seeds, study.first_seed))
        group = next((g for g in fits if _base(g[0], dataset) == _base(study, dataset)), None)
        if group:
            group.append(study)
        else:
            groups.append([study])
    return groups


def run_plan(folder: Path, plan: Plan, announce: Announce) -> bool:
    """Run the unfinished runs of a plan in a folder that studies share; False if a stop was requested."""
    make_parent(folder / "runs")
    (folder / "runs").mkdir(exist_ok=True)
    if not any((folder / "runs").iterdir()):  # also after settings that were refused before the first run
        write_whole(folder / "config.toml", to_toml(plan.base))
    check_base(folder, plan)
    return run_all(folder, plan, announce)


def check_base(folder: Path, plan: Plan) -> None:
    """Raise InputError if a folder's runs have another base config, which their names do not show."""
    before = with_settings(Config(), read_config(folder / "config.toml"))
    if _relevant_settings(before) != _relevant_settings(plan.base):
        changed = [k for k, v in _relevant_settings(plan.base).items() if _relevant_settings(before)[k] != v]
        raise InputError(f"{folder}: its runs have another {changed[0]}; give another --out, or the old settings")


def _relevant_settings(config: Config) -> Settings:
    """Return the settings that change results, or notably change how they are computed."""
    ignored = {"data.dir", "run.device", "run.processes", "run.slots", "run.together", "run.checkpoint_seconds"}
    flat = {f"{section}.{key}": value for section, keys in asdict(config).items() for key, value in keys.items()}
    return {key: value for key, value in flat.items() if key not in ignored}


def _base(study: Study, dataset: str) -> Config:
    if dataset not in study.bases:
        raise InputError(f"--dataset {dataset}: the study {study.name} has {', '.join(study.bases)}; give one of these")
    return study.bases[dataset]


def _case(base: Config, settings: Settings) -> Case:
    """Return the settings that differ from the base, with a name made of them that is the same in every study."""
    of = asdict(base)
    differ = {k: v for k, v in settings.items() if of[k.split(".")[0]].get(k.split(".")[1]) != v}
    algorithm = settings.get("algorithm.name", base.algorithm.name)
    rest = [f"{_short(key)}={_text(differ[key])}" for key in sorted(differ) if key != "algorithm.name"]
    return Case("_".join([algorithm, *rest]), differ)


def _short(key: str) -> str:
    section, _, name = key.partition(".")
    return section if name == "name" else name


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such study") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: cannot be read as TOML: {error}") from error
