"""FedCPSL in the paper's settings on a GPU: one run, many runs at once, and one device after another.

    FEDCPSL_DATA=<folder> python benchmarks/paper_gpu.py mnist|cifar10 [--runs 20] [--algorithm fedcpsl2]

Every run is the whole `fedcpsl` run into a folder with evaluation after every round, or every few; seeds differ. "In
rounds" is from the start of the first round (capture included) to the end of the last, with evaluation, metrics and
checkpoints; "in all" adds reading and splitting data and writing models. Beside it stands the local steps' arithmetic
as a share of the matmul rate measured before (forward and backward of both models, without the first layer's input
gradient; not the forward pass of weak views). With --views-share a run without them follows: what the views
take.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from fedcpsl.config import Config, read_config, with_settings
from fedcpsl.data.federation import Source
from fedcpsl.runs.environment import git_commit
from fedcpsl.runs.experiment import Experiment, GroupMember, build, load_data, start_together
from fedcpsl.simulation import minibatches
from fedcpsl.views import Views

ROOT = Path(__file__).resolve().parent.parent


def matmul_rate(precision: str, n: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a large float32 matmul, IEEE or TF32; of a bfloat16 one for bf16."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device="cuda", dtype=kind) for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return 2 * n**3 * repeats / (time.perf_counter() - start)


def flop_per_sample(module: nn.Module, x: torch.Tensor) -> int:
    """Forward, weight gradients, and input gradients of all layers but the first that learns."""
    found: list[int] = []

    def count(layer: nn.Module, _: object, y: torch.Tensor) -> None:
        per_output = layer.weight[0].numel()  # type: ignore[union-attr, index, operator]
        found.append(2 * per_output * y[0].numel())

    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return 3 * sum(found) - found[0]


def flop_per_step(experiment: Experiment) -> int:
    """Of both models on one minibatch."""
    setup = experiment.setup
    x = setup.data.x(slice(0, 1))
    return 2 * sum(setup.terms.batch_widths) * flop_per_sample(setup.terms.method.network.module, x)


def measure(config: Config, source: Source, runs: int, rounds: int, executor: str) -> dict[str, float | int | str]:
    began = time.perf_counter()
    settings = {"work.rounds": rounds, "run.executor": executor, "run.device": "cuda"}
    experiments: list[Experiment] = []
    for seed in range(runs):
        own = with_settings(config, settings | {"run.seed": seed})
        experiments.append(build(own, source, experiments))
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / f"seed{seed}" for seed in range(runs)]
        members = [GroupMember(e, f, lambda *_: None) for e, f in zip(experiments, folders, strict=True)]
        start_together(members)
        ends = [json.loads((f / "metrics.jsonl").read_text().splitlines()[-1]) for f in folders]
    return {
        "executor": executor,
        "runs": runs,
        "rounds": rounds,
        "steps": sum(end["steps"] for end in ends),
        "in_rounds": sum(end["seconds"] for end in ends),
        "in_all": time.perf_counter() - began,
        "flop": sum(end["steps"] for end in ends) * flop_per_step(experiments[0]),
        "accuracy": sum(end["personal"]["mean"] for end in ends) / runs,
    }


@contextmanager
def without_views() -> Iterator[None]:
    """Samples themselves in place of their views."""
    itself = Views(lambda x, _: x, lambda x, _: x)
    with mock.patch.object(minibatches, "views_for", return_value=itself):
        yield


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("dataset", choices=("mnist", "cifar10"))
    options.add_argument("--runs", type=int, nargs="*", default=[1, 20])
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--sequential-rounds", type=int, default=3, help="fewer: it is the slow one; 0 leaves it out")
    options.add_argument("--algorithm", default="fedcpsl")
    options.add_argument("--active", type=int, help="devices a round; as in the paper by default")
    options.add_argument("--views-share", action="store_true", help="each run without views too")
    options.add_argument("--evaluate-every", type=int, default=1)
    options.add_argument("--precision", default="ieee", choices=("ieee", "tf32", "bf16"))
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    rate = matmul_rate(chosen.precision)
    machine = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    print(f"{machine}, {chosen.dataset}, {chosen.precision}, matmul {rate / 1e12:.1f} TFLOP/s", flush=True)
    config = with_settings(Config(), read_config(ROOT / f"experiments/{chosen.dataset}.toml"))
    eta = {"mnist": 0.02, "cifar10": 0.01}[chosen.dataset]
    own = {"algorithm.name": chosen.algorithm, "algorithm.eta": eta} if chosen.algorithm != "fedcpsl" else {}
    own |= {"work.active": chosen.active} if chosen.active else {}
    own |= {"run.precision": chosen.precision, "run.evaluate_every": chosen.evaluate_every}
    config = with_settings(config, own)
    source = load_data(config.data)
    jobs = [(runs, chosen.rounds, "vectorised") for runs in chosen.runs]
    jobs += [(1, chosen.sequential_rounds, "sequential")] if chosen.sequential_rounds else []
    began = time.perf_counter()
    measure(config, source, 1, 1, "vectorised")
    print(f"a first run of one round, with what is compiled once on a machine: {time.perf_counter() - began:.1f} s")
    found = []
    for job, views in [(job, True) for job in jobs] + [(job, False) for job in jobs if chosen.views_share]:
        with nullcontext() if views else without_views():
            f = measure(config, source, *job) | {"views": views}
        found.append(f)
        share = float(f["flop"]) / float(f["in_rounds"]) / rate
        print(
            f"{f['executor']:<11} {f['runs']:>3} runs of {f['rounds']:>4} rounds, {f['steps']:>7} steps: "
            f"{f['in_rounds']:7.2f} s in rounds, {f['in_all']:7.2f} s in all, {100 * share:6.2f} % of the matmul rate, "
            f"mean accuracy {f['accuracy']:.4f}" + ("" if views else ", without views"),
            flush=True,
        )
    if chosen.out:
        result = {"git_commit": git_commit(), "device": torch.cuda.get_device_name(), "rate": rate, "measured": found}
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
