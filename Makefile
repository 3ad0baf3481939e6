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

.PHONY: help lab test test-fast test-serving test-quality test-notebooks test-blanks test-browser test-colab build notebooks figures lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml requirements.txt requirements-nodeps.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; ok = (3, 11) <= v[:2]; sys.exit(None if ok else f"kvlab needs Python 3.11 or newer; {sys.executable} is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 ...")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "No virtual environment: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -r requirements.txt
	$(PY) -m pip install -q --no-deps -r requirements-nodeps.txt
	$(PY) -m pip install -qq --no-deps -e .
	@touch $(READY)

lab: $(READY) ## JupyterLab on the notebooks (ARGS="--no-browser --port 8890" and the like go to jupyter)
	$(BIN)/jupyter lab $(ROOT) --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

test: lint test-fast test-serving test-quality test-notebooks test-browser ## everything: lint, tests, the solved notebooks, widgets in a real browser

test-fast: $(READY) ## the package's tests: no notebooks, no browser
	$(PYTEST) tests --ignore tests/notebooks --ignore tests/browser --ignore tests/quality \
	  --ignore tests/serving_full --expect fast $(ARGS)

test-serving: $(READY) ## 300 random workloads on the engine, each request held against itself alone
	$(PYTEST) tests/serving_full --expect serving $(ARGS)

test-quality: $(READY) ## what the caches cost SmolLM2 on real text: prints the figures, checks the claims
	$(PY) -m pytest tests/quality -s --timeout 1500 --expect quality $(ARGS)

test-notebooks: $(READY) ## run the solved notebooks, look at the saved ones
	$(PYTEST) tests/notebooks notebooks/solutions --nbmake --nbmake-timeout 900 --timeout 1500 --expect notebooks $(ARGS)

test-blanks: $(READY) ## run the notebooks as a reader first meets them, exercises unanswered
	$(PYTEST) notebooks --ignore notebooks/solutions --nbmake --nbmake-timeout 900 --timeout 1500 --expect blanks $(ARGS)

test-browser: $(READY) ## notebooks' sliders in JupyterLab, and figures/memory_explorer.html, in Chromium
	$(PY) -m pytest tests/browser --expect browser $(ARGS)

COLAB := .venv-colab
$(COLAB)/.ready: pyproject.toml requirements-colab.txt requirements-nodeps.txt
	@test -x $(COLAB)/bin/python || $(PYTHON) -m venv $(COLAB)
	$(COLAB)/bin/python -m pip install -q --upgrade pip
	$(COLAB)/bin/python -m pip install -q -r requirements-colab.txt
	$(COLAB)/bin/python -m pip install -q --no-deps -r requirements-nodeps.txt
	$(COLAB)/bin/python -m pip install -qq --no-deps -e .
	@touch $(COLAB)/.ready

test-colab: $(COLAB)/.ready ## widgets, figures and solved notebooks on Colab's versions (PYTHON=python3.13 where there is one)
	OMP_NUM_THREADS=1 KVLAB_BUDGET=quick $(COLAB)/bin/python -m pytest -n 2 tests/plots tests/notebooks tests/test_nbtools.py \
	  notebooks/solutions --nbmake --nbmake-timeout 900 --timeout 1500 --expect colab $(ARGS)

build: $(READY) ## generate the blank notebooks, badges, setup cells and the README's table
	$(PY) -m kvlab.nbtools build

notebooks: build ## the same, then run all notebooks and save their outputs (ARGS=01 for those with 01 in their path)
	KVLAB_BUDGET=full $(PY) -m kvlab.nbtools run $(ARGS)

figures: $(READY) ## draw the pictures in figures/
	$(PY) -m kvlab.gallery $(ARGS)

lint: $(READY) ## ruff on code and notebooks; blanks, badges and setup cells as generated
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) -m kvlab.nbtools check

format: $(READY) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(COLAB) .pytest_cache .ruff_cache .hypothesis build ./*.egg-info
