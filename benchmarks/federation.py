"""What a round of a real federation costs beyond its work, beside an empty Flower app that exchanges the same messages.

    python benchmarks/federation.py [--devices 5] [--rounds 6]

Both run here, one after the other, without TLS: a server and devices on loopback, the paper's MNIST model (199,210
parameters). A round sends theta and c to every device, and theta's change back. Devices of fedcpsl take one local step
on two samples, which is no work to speak of. The empty app's devices send back what they got the size of.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from fedcpsl.flower.processes import (
    environment,
    free_port,
    program,
    superexec_command,
    superlink_command,
    supernode_command,
    wait_until_healthy,
)
from fedcpsl.flower.registry import CONNECTION, write_connection
from fedcpsl.flower.supervisor import Supervisor
from fedcpsl.runs.manifest import cpu_name, git_commit

PARAMETERS = 199210
JOB = """
[federation]
shape = [784]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
least = {devices}
deadline = 120
[model]
name = "mlp"
hidden = [200, 200]
[work]
rounds = {rounds}
active = {devices}
unit = "steps"
amount = 1
batch_labelled = 1
batch_unlabelled = 1
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "empty"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr>=1.41.0"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "empty.server:app"
clientapp = "empty.client:app"
[tool.flwr.app.config]
out = ""
rounds = 1
devices = 1
"""
SERVER = f"""
import json, time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    wanted, seconds = int(context.run_config["devices"]), []
    while len(list(grid.get_node_ids())) < wanted:
        time.sleep(0.5)
    for r in range(int(context.run_config["rounds"])):
        began = time.time()
        arrays = {{k: Array(np.full({PARAMETERS}, r + i, np.float32)) for i, k in enumerate(("theta", "c"))}}
        content = RecordDict({{"arrays": ArrayRecord(arrays)}})
        messages = [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]
        replies = list(grid.send_and_receive(messages, timeout=120))
        assert len(replies) == wanted and not any(reply.has_error() for reply in replies), replies
        seconds.append(time.time() - began)
    open(context.run_config["out"], "w").write(json.dumps(seconds))
"""
CLIENT = f"""
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    first = message.content["arrays"]["theta"].numpy()[0]
    arrays = {{"delta": Array(np.full({PARAMETERS}, first + context.node_id % 97, np.float32))}}
    return Message(RecordDict({{"arrays": ArrayRecord(arrays)}}), reply_to=message)
"""


def empty_app(folder: Path, devices: int, rounds: int) -> list[float]:
    """Seconds of every round of the empty app."""
    app, home, port, out = folder / "app", folder / "home", free_port(), folder / "seconds.json"
    (app / "empty").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    for name, text in (("__init__", ""), ("server", SERVER), ("client", CLIENT)):
        (app / "empty" / f"{name}.py").write_text(text)
    write_connection(home, f"127.0.0.1:{port}", None)
    with Supervisor(environment(home), folder / "logs") as programs:
        programs.start("superlink", superlink_command(None, folder / "db", port=port))
        wait_until_healthy(f"http://127.0.0.1:{port}", None, 60, programs)
        programs.start("superexec", superexec_command(None, port=port))
        for i in range(devices):
            command = supernode_command(f"127.0.0.1:{port}", None, None, {"name": f"d{i}"}, free_port())
            programs.start(f"node{i}", command)
        config = f"out={json.dumps(str(out))} rounds={rounds} devices={devices}"
        command = [program("flwr"), "run", str(app), CONNECTION, "--run-config", config]
        subprocess.run(command, env=environment(home), check=True, capture_output=True)
        while not out.exists():
            programs.tend()
            time.sleep(0.5)
        time.sleep(0.5)
        return list(json.loads(out.read_text()))


def fedcpsl(folder: Path, devices: int, rounds: int) -> list[float]:
    """Seconds from one counted round to the next of our federation."""
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(devices=devices, rounds=rounds))
    port, processes = free_port(), []
    for i in range(devices):
        rng = np.random.default_rng(i)
        y = np.where(np.arange(12) % 2, -1, rng.integers(0, 10, 12))
        np.savez(folder / f"d{i}.npz", x=rng.normal(size=(12, 784)).astype(np.float32), y=y)
    commands = [["serve", "job.toml", "--insecure", "--port", str(port), "--folder", "server"]]
    for i in range(devices):
        commands.append(["join", f"127.0.0.1:{port}", "--data", f"d{i}.npz", "--name", f"d{i}", "--insecure"])
    for words in commands:
        with (folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "fedcpsl", *words]
            processes.append(subprocess.Popen(command, cwd=folder, stdout=log, stderr=log))
    try:
        at: dict[int, float] = {}
        while processes[0].poll() is None:
            path = folder / "server" / "status.json"
            if path.exists():
                status = json.loads(path.read_text())
                at.setdefault(status["round"], status["updated"])
            time.sleep(0.05)
        assert processes[0].returncode == 0, (folder / "log").read_text()[-2000:]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    return [at[r + 1] - at[r] for r in range(1, rounds)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--devices", type=int, default=5)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--out", type=Path, help="also write the results as JSON")
    chosen = options.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, measure in {"empty Flower app": empty_app, "fedcpsl": fedcpsl}.items():
            seconds = measure(Path(folder) / measure.__name__, chosen.devices, chosen.rounds)[1:]
            found[name] = seconds
            middle, span = statistics.median(seconds), f"{min(seconds):.2f} to {max(seconds):.2f}"
            print(f"{name:<18} median {middle:5.2f} s a round ({span})", flush=True)
    ratio = statistics.median(found["fedcpsl"]) / statistics.median(found["empty Flower app"])
    print(f"fedcpsl takes {ratio:.2f} times as long; {chosen.devices} devices, {PARAMETERS:,} parameters, {cpu_name()}")
    if chosen.out:
        result = {"git_commit": git_commit(), "cpu": cpu_name(), "devices": chosen.devices, "seconds": found}
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
