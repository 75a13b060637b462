# The two commands of the README are `make demo` and `make test`. What is done already is skipped on the next run.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Two OpenMP threads on a busy two-core machine run ten times slower than one.
test test-harnesses fuzz check dose-table saturation selection-table vectors bench soak paper-table data-efficiency drop-table: export OMP_NUM_THREADS ?= 1
# litellm asks the network for prices at import otherwise.
test: export LITELLM_LOCAL_MODEL_COST_MAP = True

.PHONY: demo test test-harnesses fuzz check format dose-table saturation selection-table vectors notebook bench soak \
	paper-table data-efficiency drop-table clean

demo: $(VENV)/.core
	$(BIN)/traitbasis demo

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile

# At least 5,000 requests that nobody thought of; the same every time, unless SEED=7. TIMES=10 sends more.
fuzz: $(VENV)/.test
	$(BIN)/python -m pytest tests/fuzz --least 5000 --timeout 3600 $(SEED:%=--hypothesis-seed=%) $(TIMES:%=--times=%)

# Every harness that PyPI has, unmodified, against `traitbasis serve`; each group in an environment of its own.
test-harnesses: $(VENV)/.core $(VENV)/harnesses/openai1/.installed $(VENV)/harnesses/openai3/.installed
	$(BIN)/python tests/harnesses/run.py $(VENV)/harnesses

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy traitbasis server experiments

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The table of the README: what the default dose does on tasks that are not in the pairs.
dose-table: $(VENV)/.core
	$(BIN)/python experiments/default_dose.py --out experiments/results/default_dose.json

# How many pairs make a vector: the paper says four. Table, figures, and a plot where matplotlib is installed.
saturation: $(VENV)/.core
	$(BIN)/python experiments/saturation.py

# The chosen layers and doses on tasks that the choice never saw, against a prompt, a random direction and the middle layer.
selection-table: $(VENV)/.core
	$(BIN)/python experiments/selection.py

# The paper's four dimensions and conduct, for every method, by model-free instruments. Goes on when killed.
paper-table: $(VENV)/.test
	$(BIN)/python experiments/paper_table.py

# Fidelity of SFT and LoRA by the number of samples, beside steering.
data-efficiency: $(VENV)/.test
	$(BIN)/python experiments/data_efficiency.py

# What steered users cost scripted agents in tau-trait, beside the noise floor.
drop-table: $(VENV)/.test
	$(BIN)/python experiments/drop_table.py

# What ships for the embedded model: vectors, layers and doses, the calibrated basis, leakage. About an hour on 2 cores.
vectors: $(VENV)/.core
	$(BIN)/traitbasis extract --trait all
	$(BIN)/traitbasis select --trait all
	$(BIN)/traitbasis calibrate --doses 0.05,0.1,0.2,0.3,0.4,0.5 --turns 10
	$(BIN)/traitbasis basis leakage --dtype bfloat16 --turns 10

# The notebook with the outputs of a full run.
notebook: $(VENV)/.test
	$(BIN)/python experiments/execute_notebook.py

# The figures of docs/performance.md: about half an hour for each dtype on one core.
bench: $(VENV)/.core
	for dtype in float32 bfloat16; do \
		$(BIN)/traitbasis bench engine --dtype $$dtype --out experiments/bench/results/$$dtype.json || exit 1; \
	done

# 10,000 requests: the prefix cache keeps its bound, and memory stays flat.
soak: $(VENV)/.core
	$(BIN)/python experiments/bench/soak.py --out experiments/bench/results/soak.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("TraitBasis needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing TraitBasis into $(VENV) (once; some minutes without a word)"
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt $(VENV)/.core | $(BIN)/python
	@echo "installing what the tests need into $(VENV) (once; a minute or two)"
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/harnesses/%/.installed: tests/harnesses/%/requirements.txt | $(BIN)/python
	@echo "installing the harnesses of tests/harnesses/$* into $(VENV)/harnesses/$* (once)"
	$(PYTHON) -m venv $(VENV)/harnesses/$*
	$(VENV)/harnesses/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement $<
	@touch $@
