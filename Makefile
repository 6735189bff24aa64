# Both commands set up everything they need in .venv and reuse it.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow wrap wheel setup clean

demo: setup
	@$(BIN)/python examples/demo.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: setup
	$(BIN)/pytest -m "slow or gpu"

wrap: setup
	$(BIN)/python tests/prose.py

wheel:
	.ci/wheel

setup: .venv/ready

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("unitsphere needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@echo "setting up .venv (torch is large: about a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv runs build dist *.egg-info
