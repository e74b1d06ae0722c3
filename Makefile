# Two commands: `make quickstart` trains and talks to a small Kimi K3; `make test` proves the code.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: quickstart test test-sandbox lint format types clean

quickstart: $(VENV)/.base
	$(BIN)/k3 quickstart

# Sandbox tests are part of it: they fetch runsc from this machine's Debian mirror where there is
# none, and say why they skip where the kernel forbids it.
test: lint types
	$(BIN)/python -m pytest -rs -n $(JOBS) --dist loadfile

# Only the tests that run real sandboxes.
test-sandbox: $(VENV)/.dev
	$(BIN)/python -m pytest -rs -n $(JOBS) --dist loadfile -m sandbox

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/basedpyright --level error

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "OpenK3 needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml requirements/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[plot,vision]'
	@touch $@

$(VENV)/.dev: pyproject.toml requirements/constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c requirements/constraints.txt -e '.[dev,kernels]'
	@touch $(VENV)/.base $@

clean:
	rm -rf $(VENV) .ruff_cache .pytest_cache .hypothesis
