"""The machine's matmul rate, FLOP/s: the best of some square matmuls, each sustained for a while.

python benchmarks/peers/matmul.py [--device cuda] [--precision tf32] [--threads 2]
"""

import argparse
import time

import torch


def rate(n: int, device: str, dtype: torch.dtype, seconds: float = 0.4) -> float:
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        a @ b
    wait()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10 if device == "cuda" else 1):
            a @ b
            count += 1
        wait()
    return 2 * n**3 * count / (time.perf_counter() - start)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--precision", choices=["ieee", "tf32", "bf16"], default="ieee")
    options.add_argument("--threads", type=int, default=0)
    chosen = options.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.backends.cuda.matmul.allow_tf32 = chosen.precision == "tf32"
    dtype = torch.bfloat16 if chosen.precision == "bf16" else torch.float32
    sizes = (4096, 8192) if chosen.device == "cuda" else (512, 1024, 2048)
    print(max(rate(n, chosen.device, dtype) for n in sizes))


if __name__ == "__main__":
    main()
