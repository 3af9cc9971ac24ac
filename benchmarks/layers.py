"""Times forward and backward passes of convolutional networks on a GPU: vmap, PyTorch's operations, our own kernels.

    PYTHONPATH=src python3 benchmarks/layers.py [--tiles] [--seconds 85]

Every way is checked against float64 first (relative errors of the outputs and of the worst gradient; a ReLU or a window
decided otherwise by a rounding moves gradients by some per cent). A step is captured as a CUDA graph; times are medians
over replays. Then the parts of the first workload, with what they reach.
"""

import argparse
import time
import traceback
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor, nn

from fedcpsl.engine.convolution import Geometry, channels_first, patches
from fedcpsl.engine.dropout import KeyedDropout, with_keyed_dropout
from fedcpsl.engine.forward_backward import backward, bind, forward
from fedcpsl.engine.layer_kinds import Layer, differentiated_by_hand, walk
from fedcpsl.engine.precision import Arithmetic
from fedcpsl.models import cnn

START = time.perf_counter()
VMAP = "vmap"
WAYS: list[tuple[str, Arithmetic]] = [
    (VMAP, Arithmetic("ieee", "off")),
    (VMAP, Arithmetic("tf32", "off")),
    ("torch", Arithmetic("ieee", "off")),
    ("torch", Arithmetic("tf32", "off")),
    ("torch", Arithmetic("bf16", "off")),
    ("own", Arithmetic("ieee")),
    ("own", Arithmetic("tf32")),
    ("own", Arithmetic("bf16")),
    ("own", Arithmetic("ieee", "tf32x3")),
    ("own", Arithmetic("ieee", "ieee")),
]


def two_convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def paper() -> nn.Sequential:
    return cnn((3, 32, 32), 10)


WORKLOADS = [  # a title, the network, the ways to time it, and slots, models and batch
    ("two convolutions 3 x 3, 50 slots x 1 model, batch 10", two_convolutions, WAYS, 50, 1, 10),
    ("the paper's CNN, 2 slots x 2 models, batch 64", paper, WAYS[:-1], 2, 2, 64),
    ("the paper's CNN, 24 slots x 2 models, batch 64", paper, WAYS[:-1], 24, 2, 64),
]


def allow_tf32(arithmetic: Arithmetic) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arithmetic.precision == "tf32"


class Workload:
    """A network with parameters for slots x models, one batch and dropout keys."""

    def __init__(self, module: nn.Module, slots: int, models: int, batch: int) -> None:
        torch.manual_seed(0)
        self.module = module.cuda()
        with_keyed_dropout(self.module)
        own = dict(self.module.named_parameters())
        self.parameters = {
            name: p.detach() * (1 + 0.1 * torch.randn(slots, models, *[1] * p.dim(), device="cuda"))
            for name, p in own.items()
        }
        self.x = torch.randn(slots, 1, batch, 3, 32, 32, device="cuda")
        self.keys = torch.randint(-(2**62), 2**62, (slots, 1, batch), device="cuda")
        self.slope = torch.randn(slots, models, batch, 10, device="cuda")

    def step(self, arithmetic: Arithmetic, dtype: torch.dtype = torch.float32) -> tuple[Callable[[], Tensor], dict]:
        """One pass forwards and backwards, and the totals that it adds to."""
        parameters = {name: p.to(dtype) for name, p in self.parameters.items()}
        totals = {name: torch.zeros_like(p) for name, p in parameters.items()}
        x, slope = self.x.to(dtype), self.slope.to(dtype)
        layers = walk(self.module, parameters)
        bound, by_hand = bind(layers, parameters, totals, arithmetic), differentiated_by_hand(layers)

        def run() -> Tensor:
            with torch.inference_mode(by_hand):
                y, pulls = forward(bound, x, self.keys)
                backward(pulls, slope)
            return y

        return run, totals

    def exact(self) -> list[Tensor]:
        run, totals = self.step(Arithmetic(kernels="off"), torch.float64)
        return [run(), *totals.values()]


def captured(run: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph:
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def milliseconds(run: Callable[[], object], calls: int = 1, repeats: int = 25) -> float:
    """The median time of one call, replayed."""
    graph = captured(run, calls)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    del graph
    torch.cuda.empty_cache()
    return sorted(times)[repeats // 2]


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def time_way(workload: Workload, exact: list[Tensor], kind: str, arithmetic: Arithmetic) -> str:
    allow_tf32(arithmetic)
    never = {f"fedcpsl.engine.{module}.{name}": (lambda _: False)
             for module in ("walk", "passes") for name in ("is_convolution", "is_pooling")}  # fmt: skip
    patches_ = [patch(name, how) for name, how in never.items()] if kind == VMAP else []
    for one in patches_:
        one.start()
    try:
        begun = time.perf_counter()
        run, totals = workload.step(arithmetic)
        y = run()
        torch.cuda.synchronize()
        first = time.perf_counter() - begun
        worst = max(error(total, one) for total, one in zip(totals.values(), exact[1:], strict=True))
        wrong = f"{error(y, exact[0]):.1e} {worst:.1e}"
        return f"{milliseconds(run):9.3f} ms   errors {wrong}   first call {first:5.1f} s"
    finally:
        for one in patches_:
            one.stop()


def table(workload: Workload, ways: list[tuple[str, Arithmetic]], seconds: float) -> None:
    exact = workload.exact()
    for kind, arithmetic in ways:
        label = f"  {kind:6s}{arithmetic.precision:5s} {arithmetic.kernels:7s}"
        print(label, guarded(lambda k=kind, a=arithmetic: time_way(workload, exact, k, a), seconds), flush=True)


def guarded(make: Callable[[], str], seconds: float) -> str:
    """What it says, or why it could not."""
    if time.perf_counter() - START > seconds:
        return "left out: out of time"
    try:
        return make()
    except Exception as why:
        place = traceback.extract_tb(why.__traceback__)[-1]
        return (
            f"{type(why).__name__}: {' '.join(str(why).split())[:300]} ({place.filename.split('/')[-1]}:{place.lineno})"
        )


class Parts:
    """The parts of the first workload: 50 slots, batch 10."""

    first = Geometry(3, (32, 32), (3, 3), (1, 1), (1, 1), ((0, 0), (0, 0)))
    second = Geometry(32, (30, 30), (3, 3), (1, 1), (1, 1), ((0, 0), (0, 0)))
    flop_1, flop_2, flop_linear = (2 * 500 * n for n in (900 * 27 * 32, 784 * 288 * 64, 12544 * 128))

    def __init__(self, seconds: float) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda")

        self.seconds = seconds
        self.x, self.between = random(50, 1, 10, 3, 32, 32), channels_first(random(50, 1, 10, 30, 30, 32))
        self.weight_1, self.weight_2 = random(50, 1, 32, 3, 3, 3), random(50, 1, 64, 32, 3, 3)
        self.bias_1, self.bias_2 = random(50, 1, 32), random(50, 1, 64)
        self.after = channels_first(random(50, 1, 10, 28, 28, 64))
        self.rows, self.matrix = random(50, 7840, 288), random(50, 64, 288)
        self.pooled, self.wide = random(50, 1, 10, 64, 14, 14), random(50, 128, 12544)
        self.flat, self.hidden = random(50, 10, 12544), random(50, 10, 128)
        self.keys = torch.randint(-(2**62), 2**62, (50, 1, 10), device="cuda")

    def line(self, name: str, run: Callable[[], object], flop: float = 0, numbers: float = 0) -> None:
        """One part: its time, and its rate of arithmetic or of numbers (4 bytes) read and written."""

        def measured() -> str:
            ms = milliseconds(run, calls=5)
            rates = [f"{flop / ms / 1e9:7.1f} TFLOP/s"] if flop else []
            rates += [f"{4e-6 * numbers / ms:7.0f} GB/s"] if numbers else []
            return f"{1e3 * ms:8.1f} us  {'  '.join(rates)}"

        with torch.inference_mode():
            print(f"  {name:36s}", guarded(measured, self.seconds), flush=True)

    def conv2(self, dot: str, label: str = "") -> None:
        from fedcpsl.engine import launch

        y, g, weight, bias, two = self.between, self.after, self.weight_2, self.bias_2, self.second
        self.line(f"conv2 {dot} {label}", lambda: launch.convolve(y, weight, bias, two, dot), self.flop_2)
        back = f"conv2 x gradient {dot} {label}"
        self.line(back, lambda: launch.x_gradient(g, weight, two, dot, relu_of=y), self.flop_2)

    def conv2_weights(self, dot: str, label: str = "") -> None:
        from fedcpsl.engine import launch

        given = (self.between, self.after, self.weight_2, self.bias_2, self.second, dot)
        self.line(f"conv2 weight gradient {dot} {label}", lambda: launch.add_weight_gradient(*given), self.flop_2)

    def conv1(self, dot: str) -> None:
        from fedcpsl.engine import launch

        x, weight, bias, one = self.x, self.weight_1, self.bias_1, self.first
        numbers = x.numel() + self.between.numel()
        self.line(f"conv1 {dot}", lambda: launch.convolve(x, weight, bias, one, dot, relu=True), self.flop_1, numbers)
        given = (x, self.between, weight, bias, one, dot)
        self.line(f"conv1 weight gradient {dot}", lambda: launch.add_weight_gradient(*given), self.flop_1, numbers)

    def linear(self, dot: str) -> None:
        from fedcpsl.engine import launch_linear as own

        flat, wide, hidden, bias = self.flat, self.wide, self.hidden, self.hidden[:, :1]
        flop, read = self.flop_linear, wide.numel()
        self.line(f"linear1 {dot}", lambda: own.outputs(flat, wide, bias, dot), flop, read)
        self.line(f"linear1 x gradient {dot}", lambda: own.x_gradient(hidden, wide, dot), flop, read)
        into = f"linear1 weight gradient {dot}"
        self.line(into, lambda: own.add_weight_gradient(wide, hidden, flat, dot), flop, 2 * read)

    def copies(self) -> None:
        from fedcpsl.engine import launch

        grid = self.between.movedim(-3, -1).flatten(0, 2)
        columns = self.rows.view(-1, 288)
        numbers = grid.numel() + columns.numel()
        self.line("conv2 patches, torch", lambda: patches(grid, self.second), 0, numbers)
        self.line("conv2 patches, own", lambda: launch.patches(grid, self.second), 0, numbers)
        self.line("conv2 sum of patches, own", lambda: launch.add_up_patches(columns, self.second, 500), 0, numbers)
        layer = Layer(nn.MaxPool2d(2), {}, rectified=True, before_flat=True)
        _, pull = launch.pooling(layer, (2, 2), self.after)
        numbers = self.after.numel() + 1.25 * self.pooled.numel()
        self.line("ReLU and pooling, own", lambda: launch.pooling(layer, (2, 2), self.after), 0, numbers)
        self.line("their gradient, own", lambda: pull(self.pooled, True), 0, numbers)
        drop = KeyedDropout(0.25, 0, False)
        numbers = 2 * self.pooled.numel()
        self.line("dropout, own", lambda: launch.dropout(drop, self.pooled, self.keys), 0, numbers)

    def matmuls(self, precision: str) -> None:
        allow_tf32(Arithmetic(precision))
        slopes = self.after.movedim(-3, -1).reshape(50, 7840, 64)
        rows, matrix, flat, wide, hidden = self.rows, self.matrix, self.flat, self.wide, self.hidden
        flop, read = self.flop_linear, wide.numel()
        self.line(f"conv2 bmm {precision}", lambda: torch.bmm(rows, matrix.mT), self.flop_2)
        self.line(f"conv2 x gradient bmm {precision}", lambda: torch.bmm(slopes, matrix), self.flop_2)
        self.line(f"conv2 weight gradient bmm {precision}", lambda: matrix.baddbmm_(slopes.mT, rows), self.flop_2)
        self.line(f"linear1 bmm {precision}", lambda: torch.bmm(flat, wide.mT), flop, read)
        self.line(f"linear1 x gradient bmm {precision}", lambda: torch.bmm(hidden, wide), flop, read)
        into = f"linear1 weight gradient bmm {precision}"
        self.line(into, lambda: wide.baddbmm_(hidden.mT, flat), flop, 2 * read)


def all_parts(parts: Parts) -> None:
    for dot in ("tf32", "bf16", "tf32x3"):
        parts.conv1(dot)
        parts.conv2(dot)
        parts.conv2_weights(dot)
    for dot in ("tf32", "bf16"):
        parts.linear(dot)
    parts.copies()
    for precision in ("ieee", "tf32"):
        parts.matmuls(precision)


TILES = [(128, 64, 32, 4, s) for s in (3, 2, 4)] + [(128, 64, 32, 8, 3), (64, 64, 32, 4, 3), (256, 64, 32, 8, 3)]
WEIGHT_TILES = [(32, 64, 128, 4, 3), (32, 32, 128, 4, 3), (64, 64, 64, 4, 3), (64, 64, 128, 4, 2)]
WEIGHT_TILES += [(32, 64, 128, 8, 3), (32, 64, 64, 2, 3), (32, 32, 64, 2, 4), (32, 32, 128, 2, 3)]
WEIGHT_TILES += [(64, 32, 64, 2, 3), (16, 64, 64, 2, 4), (16, 64, 128, 2, 4)]


def other_tiles(parts: Parts) -> None:
    """The second convolution in programs of other sizes, to choose from."""
    for dot in ("tf32", "bf16", "tf32x3"):
        for tile in TILES:
            with patch("fedcpsl.engine.launch_convolution.TILE", tile):
                parts.conv2(dot, str(tile))
        for tile in WEIGHT_TILES:
            with patch.dict("fedcpsl.engine.launch_convolution.WEIGHT_TILES", {dot: tile}):
                parts.conv2_weights(dot, str(tile))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=85, help="begin nothing new after so long")
    options.add_argument("--tiles", action="store_true", help="time the second convolution in other block sizes only")
    chosen = options.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)

    def tell(title: str, do: Callable[[], None]) -> None:
        print(f"\n{title}", flush=True)
        print(guarded(lambda: str(do() or ""), chosen.seconds))
        torch.cuda.empty_cache()

    if chosen.tiles:
        tell("other tiles", lambda: other_tiles(Parts(chosen.seconds)))
        return
    for i, (name, make, ways, *sizes) in enumerate(WORKLOADS):
        tell(name, lambda m=make, w=ways, s=sizes: table(Workload(m(), *s), w, chosen.seconds))
        if i == 0:
            tell("parts of it", lambda: all_parts(Parts(chosen.seconds)))
    print(f"{time.perf_counter() - START:.0f} s")


if __name__ == "__main__":
    main()
