# Every command makes the environment first if it is missing. A second one installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PARAMS ?= params/local.yaml

.PHONY: run sweep test soak lint lab env lock compat audit clean format

run: $(VENV)/ready
	$(BIN)/eagle3kit run $(PARAMS)

# The evaluation in depth, on a finished run: draft lengths, loads, temperatures. About fifteen minutes; may be interrupted.
sweep: $(VENV)/ready
	$(BIN)/eagle3kit run $(PARAMS) -p eval_sweep true --from 06_evaluate

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Longer than `make test` may be: the Kimi-K2.5-shaped target through all seven notebooks, with both engines; training online; one
# fault after the other; a run killed at KILLS random moments; a disk that fills up. Two hours on two cores.
KILLS ?= 20
soak: $(VENV)/ready
	EAGLE3KIT_KILLS=$(KILLS) $(BIN)/python -m pytest tests/soak -s

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lab: $(VENV)/ready
	$(BIN)/jupyter lab --ip=127.0.0.1 $(if $(filter 0,$(shell id -u)),--allow-root) notebooks/

env: $(VENV)/ready

# --no-deps: the lock is whole, and what it leaves out on purpose must stay out (see its first lines). An interrupted
# installation is gone on with: pip skips what is there, and the stamp is written last.
$(VENV)/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV): about 250 packages, 4 GB of disk, 3 to 6 minutes. It may be interrupted and run again."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Resolves the extras anew and writes the lock; takes a minute, downloads nothing but metadata.
lock: $(VENV)/ready
	$(BIN)/python tests/make_lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock

# Reads wheels of older releases of vLLM and speculators, downloaded into .compat/ (330 MB), and renders README's table.
compat: $(VENV)/ready
	$(BIN)/python tests/make_compat.py

# Known weaknesses of the locked versions, from an advisory service: needs the internet. pip-audit lives in an environment of its own.
audit:
	$(PYTHON) -m venv build/audit && build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --no-deps --disable-pip --requirement requirements.lock

clean:
	rm -rf $(VENV) .compat runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
