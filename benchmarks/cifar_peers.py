"""pfl-research's CIFAR-10 benchmark in fedcpsl and its peers, on this machine, one after another.

    FEDCPSL_DATA=<folder with CIFAR-10's batches> python benchmarks/cifar_peers.py [--rounds 60] [--warmup 5]
        [--device cuda] [--only fedcpsl,pfl] [--having TEXT] [--options shipped] [--precisions ieee,tf32] [--turns 3]
        [--out peers.json]

The workload is described in peers/common.py. Each peer gets a virtual environment of its own under .peers/, made from
the package index when it is first needed, with the PyTorch of this interpreter. For a machine without an index,

    python benchmarks/cifar_peers.py --vendor FOLDER [--python 3.12]

puts what pfl and FedJAX need, and nothing compiled, into a folder, and with --vendored FOLDER this interpreter (which
must have PyTorch and JAX) runs them from there. Flower needs Ray, so it cannot be vendored, and runs on a CPU only.

Nobody runs beside another. Peers are given their best options; "x as fast" compares with fedcpsl at the same precision.
The share is the arithmetic of a round's local steps, per time of a round, over the machine's matmul rate at that
precision, measured before and after the run (a GPU's once). Evaluation and averaging take time and count for nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import flop_per_round  # noqa: E402

ENVIRONMENTS = HERE.parent / ".peers"
SCRIPTS = {
    "fedcpsl": "fedcpsl_run.py",
    "plain": "plain.py",
    "pfl": "pfl_research.py",
    "fedjax": "fed_jax.py",
    "flower": "flower.py",
}
TORCH = f"torch=={version('torch').split('+')[0]}"
REQUIREMENTS = {
    "pfl": ["pfl==0.6.0", TORCH],
    "fedjax": ["fedjax==0.0.17", "jax"],
    "flower": ["flwr[simulation]==1.41.0", TORCH],
}
ON_GPU = {"fedjax": ["fedjax==0.0.17", "jax[cuda13]"]}
VENDORED = {
    "pfl": ["pfl==0.6.0", "dill==0.4.0", "packaging==25.0", "multiprocess==0.70.18"],
    "fedjax": [
        *("fedjax==0.0.17", "dm-haiku==0.0.17", "jmp==0.0.4", "optax==0.2.8"),
        *("absl-py==2.5.1", "tabulate==0.10.0", "msgpack==1.2.4"),
    ],
}
UNNEEDED = ("*.so", "*.pyx", "tests", "*_test.py", "__pycache__", "bin", "build", "docs", "examples", "experiments")
Result = dict[str, Any]


class Contender(NamedTuple):
    name: str
    precision: str
    options: str = ""

    @property
    def title(self) -> str:
        return f"{self.name} {self.options}".strip()


def lineup(chosen: argparse.Namespace) -> list[Contender]:
    """Who runs, with which options, in the order in which they run."""
    asked = chosen.only.split(",") if chosen.only else list(SCRIPTS)
    unknown = set(asked) - set(SCRIPTS)
    if unknown:
        sys.exit(f"--only: no {unknown.pop()}; there are {', '.join(SCRIPTS)}")
    ways = on_cpu(chosen.threads) if chosen.device == "cpu" else on_gpu()
    return [
        Contender(name, precision, options)
        for precision in chosen.precisions.split(",")
        for name, both in ways.items()
        for options in both[chosen.options]
        if name in asked
        and (name == "fedcpsl" or chosen.having in options)
        and not (precision == "bf16" and name in ("fedjax", "flower"))
        and not (chosen.vendored and name == "flower")
    ]


def on_cpu(threads: int) -> dict[str, dict[str, list[str]]]:
    """Each one's options on a CPU, all with the same number of cores."""
    alone = f"--threads {threads}"
    shared = f"--processes {threads} --threads 1 --layout nchw --fused"
    actors = [f"--actors 1 --threads {threads}", f"--actors {threads} --threads 1"]
    return {
        "fedcpsl": {"shipped": [""], "best": [""]},
        "plain": {"shipped": [alone], "best": [f"{alone} --fused"]},
        "pfl": {"shipped": [alone], "best": [f"{alone} --layout nchw --fused", shared]},
        "fedjax": {"shipped": [alone], "best": [alone, f"{alone} --preload"]},
        "flower": {"shipped": actors[:1], "best": actors},
    }


def on_gpu() -> dict[str, dict[str, list[str]]]:
    tuned = "--layout nchw --fused"
    return {
        "fedcpsl": {"shipped": [""], "best": [""]},
        "plain": {"shipped": [""], "best": ["--fused"]},
        "pfl": {"shipped": [""], "best": [tuned, f"--processes 4 {tuned}"]},
        "fedjax": {"shipped": [""], "best": ["", "--preload"]},
    }


# Where peers come from.


def interpreter(name: str, chosen: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """The Python that runs a peer, and the variables it needs; its environment is made where there is none yet."""
    if name not in REQUIREMENTS:
        return sys.executable, {}
    if chosen.vendored:
        return sys.executable, {"PYTHONPATH": str((chosen.vendored / name).resolve())}
    home = ENVIRONMENTS / name
    needed = (ON_GPU if chosen.device == "cuda" else {}).get(name, REQUIREMENTS[name])
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.is_file() or ready.read_text().split() != needed:
        print(f"making {home.relative_to(HERE.parent)} with {' '.join(needed)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needed], check=True)
        ready.write_text(" ".join(needed))
    return str(python), {}


def vendor(folder: Path, python: str) -> None:
    """pfl and FedJAX with what they import, for a given Python, less what the workload does not touch."""
    for name, needed in VENDORED.items():
        target = folder / name
        shutil.rmtree(target, ignore_errors=True)
        given = ["--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", python, "--target", target]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *given, *needed], check=True)
        for pattern in UNNEEDED:
            for found in list(target.rglob(pattern)):
                if found.is_dir():
                    shutil.rmtree(found)
                else:
                    found.unlink(missing_ok=True)  # or gone with its folder
        for info in target.glob("*.dist-info"):
            for found in [found for found in info.rglob("*") if found.is_file() and found.name != "METADATA"]:
                found.unlink()
        size = sum(found.stat().st_size for found in target.rglob("*") if found.is_file())
        print(f"{target}: {size / 2**20:.1f} MiB")


def write_images(path: Path) -> None:
    """CIFAR-10's training and test images as the scripts read them."""
    from fedcpsl.data.cifar import read_cifar10
    from fedcpsl.data.download import cache_folder
    from fedcpsl.data.sources import data_folders

    folders = data_folders("")
    x, y = read_cifar10(folders)
    x_test, y_test = test_batch([*folders, cache_folder()])
    np.savez(path, x=x, y=y, x_test=x_test, y_test=y_test)


def test_batch(folders: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    from fedcpsl.data.cifar import BINARY, PYTHON, read_binary_batch, read_python_batch

    for folder in folders:
        for place in (folder / "cifar10", folder):
            for home in (place / BINARY, place / PYTHON, place):
                if (home / "test_batch.bin").is_file():
                    return read_binary_batch(home / "test_batch.bin")
                if (home / "test_batch").is_file():
                    return read_python_batch(home / "test_batch")
    sys.exit("CIFAR-10's test_batch is not beside its training batches")


# Running them.


def matmul_rate(device: str, precision: str, threads: int) -> float:
    command = [sys.executable, HERE / "peers" / "matmul.py", "--device", device, "--precision", precision]
    command += ["--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


steady_rate = cache(matmul_rate)  # a GPU's, which is measured once


def measure(contender: Contender, data: Path, chosen: argparse.Namespace) -> Result:
    """One run in a process of its own: its line of results, or why there is none."""
    asked = contender._asdict()
    python, variables = interpreter(contender.name, chosen)
    rate_now = partial(steady_rate if chosen.device == "cuda" else matmul_rate, chosen.device, contender.precision)
    before = rate_now(chosen.threads)
    command = [python, HERE / "peers" / SCRIPTS[contender.name], "--data", data, "--rounds", str(chosen.rounds)]
    command += ["--warmup", str(chosen.warmup), "--device", chosen.device, "--precision", contender.precision]
    ended = subprocess.run(
        [*command, *contender.options.split()], env=os.environ | variables, capture_output=True, text=True
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not lines:
        return asked | {"error": " ".join((ended.stderr.strip() or "no result").splitlines()[-1:]), "log": ended.stderr}
    result = json.loads(lines[-1])
    rate = mean([before, rate_now(chosen.threads)])
    return asked | {"result": result, "matmul_flops": rate, "share": flop_per_round() / result["mean_ms"] * 1e3 / rate}


def summary(contender: Contender, runs: list[Result]) -> Result | None:
    """The median of a contender's runs; None where it has none."""
    own = [run for run in runs if Contender(*(run[f] for f in Contender._fields)) == contender and "result" in run]
    if not own:
        return None
    return {name: median(run["result"][name] for run in own) for name in ("mean_ms", "median_ms", "accuracy")} | {
        name: median(run[name] for run in own) for name in ("share", "matmul_flops")
    }


def table(contenders: list[Contender], runs: list[Result]) -> str:
    lines = [f"{'':<56}{'ms a round':>11}{'median':>10}{'x as fast':>11}{'share':>9}{'accuracy':>10}"]
    for precision in dict.fromkeys(contender.precision for contender in contenders):
        same = [contender for contender in contenders if contender.precision == precision]
        found = {contender: summary(contender, runs) for contender in same}
        ours = min((s["mean_ms"] for c, s in found.items() if s and c.name == "fedcpsl"), default=None)
        rates = [s["matmul_flops"] for s in found.values() if s]
        lines.append(f"{precision}" + (f", matmul {mean(rates) / 1e12:.3g} TFLOP/s" if rates else ""))
        for contender, row in found.items():
            if row is None:
                lines.append(f"  {contender.title:<54}{'failed':>11}")
                continue
            times = f"{ours / row['mean_ms']:.2f}" if ours else ""
            lines.append(
                f"  {contender.title:<54}{row['mean_ms']:>11.1f}{row['median_ms']:>10.1f}{times:>11}"
                f"{100 * row['share']:>7.1f} %{row['accuracy']:>10.4f}"
            )
    return "\n".join(lines)


def machine(device: str) -> str:
    if device == "cpu":
        from fedcpsl.runs.environment import cpu_name

        return cpu_name()
    asked = "import torch; print(torch.cuda.get_device_name())"  # in a process of its own, which lets go of the GPU
    return subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, text=True).stdout.strip()


def parsed() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--warmup", type=int, default=5, help="first rounds, which are not timed")
    options.add_argument("--turns", type=int, default=1, help="runs of each; a turn is one run of everybody")
    options.add_argument("--only", help=f"some of {','.join(SCRIPTS)}")
    options.add_argument("--options", choices=["best", "shipped"], default="best", help="those that peers are given")
    options.add_argument("--having", default="", metavar="TEXT", help="only the peers' ways whose options contain this")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--precisions", help="some of ieee,tf32,bf16; by default ieee, on a GPU tf32 too")
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores, on a CPU")
    options.add_argument("--out", type=Path, help="write every run's result as JSON")
    options.add_argument("--vendored", type=Path, metavar="FOLDER", help="take pfl and FedJAX from here")
    options.add_argument("--vendor", type=Path, metavar="FOLDER", help="only put pfl and FedJAX there")
    options.add_argument("--python", default="{}.{}".format(*sys.version_info), help="the Python to vendor for")
    chosen = options.parse_args()
    chosen.precisions = chosen.precisions or ("ieee,tf32" if chosen.device == "cuda" else "ieee")
    return chosen


def main() -> None:
    chosen = parsed()
    if chosen.vendor:
        vendor(chosen.vendor, chosen.python)
        return
    from fedcpsl.runs.environment import git_commit

    contenders = lineup(chosen)
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(chosen.device),
        "git_commit": git_commit(),
        "threads": chosen.threads,
        "flop_per_round": flop_per_round(),
    }
    runs: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "cifar10.npz"
        write_images(data)
        for turn in range(chosen.turns):
            for contender in contenders:
                runs.append(measure(contender, data, chosen) | {"turn": turn})
                said = runs[-1].get("error") or f"{runs[-1]['result']['mean_ms']:.1f} ms a round"
                print(f"{contender.precision} {contender.title}: {said}", flush=True)
                if chosen.out:
                    chosen.out.write_text(json.dumps(about | {"runs": runs}, indent=2) + "\n")
    print(f"\n{about['machine']}, {chosen.rounds} rounds, the first {chosen.warmup} not timed")
    print(table(contenders, runs))


if __name__ == "__main__":
    main()
