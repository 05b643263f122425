# Two commands for a fresh machine: `make ppo-math` runs the main job, `make test` the tests.
VENV ?= .venv
BIN := $(VENV)/bin

$(VENV)/.installed: pyproject.toml
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -e '.[dev]'
	touch $@

.PHONY: install ppo-math slurm-packages etcd-packages test test-fast test-engines check format
install: $(VENV)/.installed

ppo-math: install
	$(BIN)/realsys launch ppo-math

# What tests/slurm starts its own Slurm from; does nothing where that can't be installed.
slurm-packages:
	tests/slurm/install_packages

# The same for tests/etcd.
etcd-packages:
	tests/etcd/install_packages

# Two at a time: half of the suite waits for schedulers, leases and processes (tests/conftest.py says what).
test: install slurm-packages etcd-packages
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder

test-fast: install
	$(BIN)/python -m pytest tests/unit

# Real SGLang and vLLM behind our front. Makes an environment of its own for each: network, 6 GB, minutes.
test-engines: install
	tests/engines/env/install sglang .engines/sglang
	tests/engines/env/install vllm .engines/vllm
	$(BIN)/python -m pytest --timeout 900 tests/engines/real_engines.py

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
