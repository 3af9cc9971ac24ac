"""Reading a large CSV: seconds and peak memory against the file's size.

    python benchmarks/large_table.py [--rows 10000000] [--features 50]

Writes a table of random features with a label column (nine in ten empty) and a device column into a temporary folder,
then reads it in a process of its own, whose peak memory is taken from the operating system.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import csv

ROWS_AT_ONCE = 200_000
READ = """
import json, resource, sys, time
from pathlib import Path
from fedcpsl.data.tables import Columns, read_table
start = time.perf_counter()
source = read_table(Path(sys.argv[1]), Columns("label", "device"))
seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"rows": len(source.x), "array": source.x.nbytes, "seconds": seconds, "peak": peak}))
"""


def write(path: Path, rows: int, features: int, devices: int = 1000) -> None:
    rng = np.random.default_rng(0)
    schema = pa.schema([*((f"f{i}", pa.float64()) for i in range(features)), ("label", pa.string()), ("device", "str")])
    with csv.CSVWriter(path, schema) as writer:
        for first in range(0, rows, ROWS_AT_ONCE):
            count = min(ROWS_AT_ONCE, rows - first)
            columns = [pa.array(rng.normal(size=count).round(4)) for _ in range(features)]
            labels = np.where(rng.random(count) < 0.1, rng.integers(0, 5, count).astype(str), "")
            owners = rng.integers(0, devices, count).astype(str)
            writer.write_table(pa.table([*columns, pa.array(labels), pa.array(owners)], schema=schema))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=10_000_000)
    options.add_argument("--features", type=int, default=50)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.csv"
        write(path, chosen.rows, chosen.features)
        size = path.stat().st_size
        done = subprocess.run([sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    print(
        f"{found['rows']:,} rows of {chosen.features} features: file {size / 1e9:.2f} GB, read in "
        f"{found['seconds']:.0f} s, array {found['array'] / 1e9:.2f} GB, peak memory {found['peak'] / 1e9:.2f} GB, "
        f"{found['peak'] / size:.2f} times the file"
    )


if __name__ == "__main__":
    main()
