"""What a round of a real federation costs beyond its work, beside an empty Flower app that exchanges the same messages.

    python benchmarks/federation.py [--devices 5] [--rounds 6]

Both run here, one after the other: a server and devices on loopback, the paper's MNIST model (199,210 parameters);
fedcpsl with TLS and keys, the empty app without. A round sends theta and c to every device, and theta's change back.
Devices of fedcpsl take one local step on two samples, which is no work to speak of. The empty app's devices send back
what they got the size of.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np

from fedcpsl.deployment.endpoints import free_port
from fedcpsl.runs.environment import cpu_name, git_commit

PARAMETERS = 199210
JOB = """
[federation]
shape = [784]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
min_devices = {devices}
deadline = 120
[model]
name = "mlp"
hidden = [200, 200]
[algorithm]
name = "fedcpsl"
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
    home.mkdir()
    (home / "config.toml").write_text(f'[superlink.it]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    own = ["--insecure", "--host", "127.0.0.1", "--port"]
    commands = [["flower-superlink", *own, str(port), "--database", str(folder / "db")]]
    for i in range(devices):
        node = ["--superlink", f"127.0.0.1:{port}", "--node-config", f"name='d{i}'"]
        commands.append(["flower-supernode", *own, str(free_port()), *node])
    with ExitStack() as running:
        for command in commands:
            running.enter_context(_group(command, environment, folder / "log"))
            while not _answers(port):
                time.sleep(0.2)
        config = f"out={json.dumps(str(out))} rounds={rounds} devices={devices}"
        subprocess.run(["flwr", "run", str(app), "it", "--run-config", config], env=environment, check=True)
        while not out.exists():
            time.sleep(0.5)
        time.sleep(0.5)
        return list(json.loads(out.read_text()))


@contextmanager
def _group(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """A program of Flower's with all that it starts."""
    with log.open("ab") as file:
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(1)
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def fedcpsl(folder: Path, devices: int, rounds: int) -> list[float]:
    """Seconds from one counted round to the next of our federation."""
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(devices=devices, rounds=rounds))
    port, processes = free_port(), []
    for i in range(devices):
        rng = np.random.default_rng(i)
        y = np.where(np.arange(12) % 2, -1, rng.integers(0, 10, 12))
        np.savez(folder / f"d{i}.npz", x=rng.normal(size=(12, 784)).astype(np.float32), y=y)
    names = [f"d{i}" for i in range(devices)]
    made = [sys.executable, "-m", "fedcpsl", "keys", "keys", "--server", "127.0.0.1", "--devices", *names]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    commands = [["serve", "job.toml", "--keys", "keys", "--port", str(port), "--folder", "server"]]
    for name in names:
        commands.append(["join", f"127.0.0.1:{port}", "--data", f"{name}.npz", "--name", name, "--keys", "keys"])
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
            time.sleep(0.01)
        assert processes[0].returncode == 0, (folder / "log").read_text()[-2000:]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    seen = sorted(at)  # some rounds are over before they are looked at
    return [(at[b] - at[a]) / (b - a) for a, b in pairwise(seen[1:]) for _ in range(b - a)]


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
            print(f"{name:<18} median {middle:6.3f} s a round ({span})", flush=True)
    ratio = statistics.median(found["fedcpsl"]) / statistics.median(found["empty Flower app"])
    print(f"fedcpsl takes {ratio:.3f} times as long; {chosen.devices} devices, {PARAMETERS:,} parameters, {cpu_name()}")
    if chosen.out:
        result = {"git_commit": git_commit(), "cpu": cpu_name(), "devices": chosen.devices, "seconds": found}
        chosen.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
