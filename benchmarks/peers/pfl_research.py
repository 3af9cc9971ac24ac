"""The workload in pfl-research: its SimulatedBackend, FederatedAveraging and PyTorchModel, as in its own benchmark.

    python benchmarks/peers/pfl_research.py --data cifar.npz [--rounds 60] [--device cuda] [--precision tf32]
        [--processes 4] [--layout nchw] [--fused]

All images lie on the device beforehand. With --processes, several processes share the device, which pfl documents; but
it asks for NCCL where there is CUDA, and NCCL refuses several processes on one GPU, so that request gets Gloo here.
"""

import argparse
import os
import socket
import subprocess
import sys
import warnings
from functools import partial

import absent
import common
import torch

RANK = "PFL_WORKER_RANK"


def start_processes(count: int) -> int:
    """This script again, as often as asked, each told of the others by pfl's own variables."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    for each in sockets:
        each.close()
    shared = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PFL_WORKER_ADDRESSES": addresses}
    processes = [subprocess.Popen([sys.executable, *sys.argv], env=shared | {RANK: str(i)}) for i in range(count)]
    return max(abs(process.wait()) for process in processes)


def network(chosen: argparse.Namespace) -> torch.nn.Module:
    """The CNN with the two methods that pfl calls."""
    from pfl.metrics import Weighted

    class Classifier(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = common.cnn(channels_last=chosen.layout == "nhwc")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
            self.train(not eval)
            return torch.nn.functional.cross_entropy(self(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Weighted]:
            self.train(not eval)
            return {"accuracy": Weighted((self(x).argmax(-1) == y).sum().item(), len(y))}

    return Classifier().to(chosen.device)


def train(chosen: argparse.Namespace, clock: common.Clock) -> None:
    from pfl.model.pytorch import PyTorchModel  # first: it chooses the framework # isort: skip
    import numpy as np
    import pfl
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.internal.ops.pytorch_ops import distributed
    from pfl.metrics import Metrics

    class Timer(TrainingProcessCallback):
        def after_central_iteration(self, *_, **__):
            clock.round_done()
            return False, Metrics()

    assert distributed.world_size == chosen.processes
    np.random.seed(chosen.seed)
    data = common.load(chosen.data, chosen.seed)
    data = common.on_device(data.channels_last() if chosen.layout == "nhwc" else data, chosen.device)
    size = common.IMAGES_OF_CLIENT
    users = dict(enumerate(zip(data.x.split(size), data.y.split(size), strict=True)))
    training = FederatedDataset.from_slices(users, get_user_sampler("random", range(len(users))))
    tests = Dataset(raw_data=[data.x_test, data.y_test])
    evaluation = NNEvalHyperParams(local_batch_size=common.EVALUATION_BATCH[chosen.device])
    inner = network(chosen)
    model = PyTorchModel(
        model=inner,
        local_optimizer_create=partial(torch.optim.SGD, fused=True) if chosen.fused else torch.optim.SGD,
        central_optimizer=torch.optim.SGD(inner.parameters(), 1.0),
        amp_dtype=torch.bfloat16 if chosen.precision == "bf16" else None,
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=chosen.rounds,
            evaluation_frequency=10**9,  # of clients: in the first round, which is not timed, and never again
            train_cohort_size=common.ACTIVE,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=training, val_data=training, postprocessors=[WeightByUser()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=common.ETA, local_num_epochs=1, local_batch_size=common.BATCH
        ),
        model_eval_params=evaluation,
        callbacks=[CentralEvaluationCallback(tests, evaluation, frequency=common.EVALUATE_EVERY), Timer()],
        send_metrics_to_platform=False,
    )
    accuracy = model.evaluate(tests, eval_params=evaluation)["accuracy"].overall_value
    if distributed.global_rank == 0:
        common.report(chosen, clock, accuracy, len(users), pfl=pfl.__version__, torch=torch.__version__)


def main() -> None:
    options = common.options(__doc__, "bf16")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--layout", choices=["nhwc", "nchw"], default="nhwc", help="nhwc: as in pfl's benchmark")
    options.add_argument("--fused", action="store_true", help="SGD(fused=True)")
    chosen = options.parse_args()
    if chosen.processes > 1 and RANK not in os.environ:
        sys.exit(start_processes(chosen.processes))
    absent.allow("dp_accounting", "prv_accountant", "scipy", "requests")  # after torch, which looks for scipy
    os.environ["PFL_PYTORCH_DEVICE"] = chosen.device
    if chosen.processes > 1:
        warnings.filterwarnings("ignore", message=".*reduce_op.*")
        begin = torch.distributed.init_process_group
        torch.distributed.init_process_group = lambda backend=None, **more: begin("gloo", **more)  # noqa: ARG005
    train(chosen, common.Clock(chosen.rounds, chosen.warmup, common.start_torch(chosen)))
    if chosen.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
