"""This process's place in a torchrun job, from its environment. Nothing here imports torch."""

import os
from pathlib import Path

SAID = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def place() -> tuple[int, int]:
    """This process's rank and how many ranks there are: (0, 1) where torchrun has not started several."""
    if not all(os.environ.get(name) for name in SAID) or int(os.environ["WORLD_SIZE"]) == 1:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """Which of its machine's ranks this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def way_on(command: str, folder: Path, ranks: int) -> str:
    """The command that resumes a folder on a number of ranks."""
    if ranks == 1:
        return f"fedcpsl {command} --resume {folder}"
    here = place()[1] == ranks and os.environ.get("LOCAL_WORLD_SIZE") != str(ranks)  # they are on several machines
    start = "torchrun ..." if here else f"torchrun --nproc-per-node {ranks}"
    return f"{start} -m fedcpsl {command} --resume {folder}"
