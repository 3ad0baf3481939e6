# Every target makes and fills .venv by itself: Python 3.11 to 3.13, git and make are enough.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
READY  := $(VENV)/.ready
ARGS   ?=
ROOT   := $(if $(filter 0,$(shell id -u)),--allow-root)
# Two processes of one thread each: torch threads that fight over two cores are slower than either.
PYTEST := OMP_NUM_THREADS=1 KVLAB_BUDGET=quick $(PY) -m pytest -n 2

.PHONY: help lab test test-fast test-notebooks test-blanks test-browser notebooks figures lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml requirements.txt requirements-nodeps.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v[:2]; sys.exit(None if ok else f"kvlab needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "No virtual environment: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps -r requirements-nodeps.txt
	$(PY) -m pip install -q --no-deps -e .
	@touch $(READY)

lab: $(READY) ## JupyterLab on the notebooks (ARGS="--no-browser --port 8890" and the like go to jupyter)
	$(BIN)/jupyter lab $(ROOT) --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

test: lint test-fast test-notebooks test-browser ## everything: lint, tests, the solved notebooks, widgets in a real browser

test-fast: $(READY) ## the package's tests: no notebooks, no browser
	$(PYTEST) tests --ignore tests/notebooks --ignore tests/browser --expect fast $(ARGS)

test-notebooks: $(READY) ## run the solved notebooks
	$(PYTEST) tests/notebooks/test_saved.py notebooks/solutions --nbmake --nbmake-timeout 900 --timeout 1500 --expect notebooks $(ARGS)

test-blanks: $(READY) ## run the notebooks as a reader first meets them, exercises unanswered
	$(PYTEST) notebooks --ignore notebooks/solutions --nbmake --nbmake-timeout 900 --timeout 1500 --expect blanks $(ARGS)

test-browser: $(READY) ## move the sliders of notebook 01 in JupyterLab and Chromium
	KVLAB_BUDGET=quick $(PY) -m pytest tests/browser --expect browser $(ARGS)

notebooks: $(READY) ## generate the blank notebooks, run all, save their outputs
	$(PY) -m kvlab.nbtools build
	KVLAB_BUDGET=full $(PY) -m kvlab.nbtools run $(ARGS)

figures: $(READY) ## draw the pictures in figures/
	$(PY) -m kvlab.plots.figures $(ARGS)

lint: $(READY) ## ruff on code and notebooks; blanks, badges and setup cells as generated
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) -m kvlab.nbtools check

format: $(READY) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build ./*.egg-info
