# make demo: set up and run the main job.  make test: set up and run all tests.
# Both make a virtual environment in .venv and need Python 3.11 or newer and a package index, nothing else.

PYTHON ?= python3
BIN := .venv/bin
.PHONY: demo test soak soak-calm soak-hosts soak-systemd flower-app check lint docs notebooks bench bench-cifar bench-devices bench-processes bench-gpu bench-peers bench-federation hostile uplink large-table package clean

demo: .venv/ready
	$(BIN)/fedcpsl compare --algorithms fedcpsl2,fedcpsl,local,fedavg --seeds 3 --reach ""
	@echo "Open the report above in a browser."

# files side by side; the tests of one file share what they set up
test: .venv/ready-dev
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

lint: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready-dev
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# run the notebooks and save what they give
notebooks: .venv/ready-dev
	env -u FEDCPSL_DATA $(BIN)/python -m tests.notebooks

# what CI runs
check: lint docs test

bench: .venv/ready
	$(BIN)/python benchmarks/mnist_cpu.py

bench-cifar: .venv/ready
	$(BIN)/python benchmarks/cifar_cpu.py

bench-processes: .venv/ready
	$(BIN)/python benchmarks/processes.py

bench-devices: .venv/ready
	$(BIN)/python benchmarks/many_devices.py

large-table: .venv/ready-dev
	@$(BIN)/python benchmarks/large_table.py

bench-gpu: .venv/ready
	$(BIN)/python benchmarks/paper_gpu.py mnist --runs 1 20
	$(BIN)/python benchmarks/paper_gpu.py cifar10 --runs 1 12 --sequential-rounds 1
	$(BIN)/python benchmarks/paper_gpu.py cifar10 --precision tf32 --runs 1 12 --sequential-rounds 0
	$(BIN)/python benchmarks/paper_gpu.py cifar10 --precision bf16 --runs 1 12 --sequential-rounds 0

bench-peers: .venv/ready
	$(BIN)/python benchmarks/cifar_peers.py

# real processes under SIGKILL, minutes long; make soak-calm compares five of them with the simulator
soak: .venv/ready-dev
	$(BIN)/python -m tests.soak_federation
	$(BIN)/python -m tests.soak_federation --odd

soak-calm: .venv/ready-dev
	$(BIN)/python -m tests.soak_federation --calm --rounds 5

# a server behind nginx and two devices, each in a network namespace of its own; as root
soak-hosts: .venv/ready-dev
	@$(BIN)/python -m tests.soak_hosts

# the units of deploy/ under a systemd of its own, by the commands of deploy/README.md; as root
soak-systemd: .venv/ready-dev
	@$(BIN)/python -m tests.soak_systemd

# the commands of "a plain Flower app" in docs/federation.md
flower-app: .venv/ready-dev
	@$(BIN)/python -m tests.flower_app

bench-federation: .venv/ready-dev
	@$(BIN)/python benchmarks/federation.py

# what hostile devices do, and what each kind of aggregation leaves of it
hostile: .venv/ready
	@$(BIN)/python benchmarks/hostile_devices.py --out docs/results/hostile

uplink: .venv/ready
	@$(BIN)/python benchmarks/uplink.py

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tables]'
	touch $@

.venv/ready-dev: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# the wheel and the sdist, each tried in a clean environment
package: .venv/ready
	@$(BIN)/python -m tests.try_package

clean:
	rm -rf .venv docs/_build
