"""fedcpsl paper: the paper's table and figures, or another study."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcpsl.cli.compare import report_failed
from fedcpsl.cli.options import add_settings, chosen_settings
from fedcpsl.errors import InputError

if TYPE_CHECKING:
    from fedcpsl.runs.study import Study

PAPER = "table, beta, momentum, shvr, apfl, hlu, or all of these"
OTHERS = (
    "successor, successor-tune, successor-parts, successor-labels, successor-classes, successor-dirichlet, "
    "successor-foreign; related, related-tune; tune; labels, ablation, parts, classes, dirichlet, shards, gap; har, "
    "har-tune, har-steps; edge (edge-active, edge-deadline, edge-bandwidth, edge-bits); other papers' numbers: "
    "fedavg-mnist, fedavg-mnist-eta, pfedme-mnist, fedavg-cifar10, feddyn-cifar10, proxyfl-cifar10"
)


def add_paper(commands: Any) -> None:
    paper = commands.add_parser(
        "paper",
        help="the paper's table and figures, or your own study",
        description="Run a study over several seeds, and write its tables, figures and an HTML page: the paper's table "
        "and figures, further questions, or your own study. Studies share their runs; the same command again resumes "
        "where it stopped, and if all runs are finished, it only writes the results.",
        epilog="A study is a TOML file with panels and rows; experiments/ has all of these; your own file works too.",
        allow_abbrev=False,
    )
    paper.add_argument(
        "studies", nargs="+", metavar="STUDY", help=f"the paper's: {PAPER}; others: {OTHERS}; or a .toml file"
    )
    paper.add_argument("--seeds", type=int, metavar="N", help="how many seeds [as the study says, mostly 5]")
    paper.add_argument("--out", type=Path, default=Path("runs/paper"), metavar="FOLDER", help="[runs/paper]")
    for part in ("rows", "panels"):
        paper.add_argument(
            f"--{part}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"only these {part}; repeat it for several [all]",
        )
    paper.add_argument("--partial", action="store_true", help="run nothing; write the results of finished runs")
    paper.add_argument(
        "--choose",
        type=Path,
        metavar="FILE",
        help="write the best settings of every algorithm in a study with a grid to a TOML file, for `chosen` of "
        "others; with panels, of every row in each of them, for `chosen_by_panel`",
    )
    paper.add_argument("--dry-run", action="store_true", help="print the runs, and how many are not finished")
    add_settings(paper, leave_out=("--algorithm", "--data"), config=False)
    paper.set_defaults(command=_paper)


def _paper(parsed: argparse.Namespace) -> int:
    from fedcpsl.runs.study import edge_studies, find_study, on_dataset, only_some, paper_studies, together, with_more

    if parsed.seeds is not None and parsed.seeds < 1:
        raise InputError(f"--seeds {parsed.seeds}: give a whole number of at least 1")
    settings = chosen_settings(parsed)
    dataset = settings.pop("data.dataset", None)
    if "run.seed" in settings:
        raise InputError("--seed: the first seed is set by the study; give --seeds N")
    joined = {"all": paper_studies(), "edge": edge_studies()}
    names = list(dict.fromkeys(n for given in parsed.studies for n in joined.get(given, [given])))
    studies = [with_more(find_study(name), settings) for name in names]
    for name in [dataset] if dataset else list(dict.fromkeys(d for study in studies for d in study.datasets)):
        selected = [study for study in studies if name in (study.bases if dataset else study.datasets)]
        if not selected:
            raise InputError(f"--dataset {name}: none of these studies has it; they have {', '.join(studies[0].bases)}")
        selected = [only_some(on_dataset(study, name), parsed.rows, parsed.panels) for study in selected]
        for group in together(selected, name):
            code = _run(parsed, group, name)
            if code:
                return code
    return 0


def _run(parsed: argparse.Namespace, studies: Sequence["Study"], dataset: str) -> int:
    from rich.console import Console

    from fedcpsl.report.study import best_points, cells_of, print_study, rows_without_a_point, write_study
    from fedcpsl.report.study_tables import write_choice
    from fedcpsl.report.terminal import comparison_progress
    from fedcpsl.runs.comparison import run_folder
    from fedcpsl.runs.folder import is_finished, is_refused
    from fedcpsl.runs.study import check_base, plan_of, run_plan

    plan = plan_of(studies, dataset, parsed.seeds)
    folder = parsed.out / dataset
    runs = [run_folder(folder, case, seed) for seed in plan.seeds for case in plan.cases]
    if parsed.dry_run:
        missing = [run for run in runs if not is_finished(run)]
        print(*(f"{run}{'' if run in missing else '  (done)'}" for run in runs), sep="\n")
        print(f"{', '.join(study.name for study in studies)} on {dataset}: {len(runs)} runs, {len(missing)} to do")
        return 0
    finished = parsed.partial
    if parsed.partial:
        check_base(folder, plan)
    else:
        with comparison_progress(len(runs), Console(stderr=True)) as announce:
            finished = run_plan(folder, plan, announce)
    if not finished:
        print("fedcpsl: stopped; give the same command again to continue", file=sys.stderr)
        return 130
    for study in studies:
        page = write_study(folder, study, dataset, plan.seeds)
        cells = cells_of(folder, study, dataset, plan.seeds)
        print_study(study, dataset, cells)
        print(f"results  {page.parent}\nreport   {page.resolve().as_uri()}")
        if parsed.choose:
            write_choice(parsed.choose, dataset, best_points(study, dataset, cells), f"fedcpsl paper {study.name}")
            print(f"chosen   {parsed.choose}")
    code = report_failed(runs)
    if any(study.shows != "map" for study in studies) or any(map(is_refused, runs)):
        return code
    nothing = [row for study in studies for row in rows_without_a_point(cells_of(folder, study, dataset, plan.seeds))]
    for row in nothing:
        print(f"fedcpsl: every point of {row} failed: none is chosen", file=sys.stderr)
    return 1 if nothing else 0  # that some points of a search diverge is a result
