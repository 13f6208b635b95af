# make demo   the main job on a fresh machine, offline after the install
# make demo-toxicity   the same for detoxification
# make demo-summarization   supervised start, then PPO on ROUGE;  make demo-rlhf   on a reward model
# make test   the tests;  make lint   format, lint, types
# make test-distributed   runs of several processes, and DeepSpeed, which it installs; needs a C++ compiler
# make test-browser   the report page in Chromium
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch>=2.4,<2.14

# waiting OpenMP threads that spin slow a busy machine 5 to 20 times; must be set before torch starts
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo demo-toxicity demo-summarization demo-rlhf test test-distributed test-browser lint install prepare

demo: prepare
	$(BIN)/python examples/demo.py

demo-toxicity: prepare
	$(BIN)/python examples/demo.py --task toxicity --eval_prompts 40 --eval_returns 8

demo-summarization: prepare
	$(BIN)/python examples/demo_summarization.py

demo-rlhf: prepare
	$(BIN)/python examples/demo_summarization.py --reward preference

# files side by side, one process per core; each takes up to 2 GB
test: prepare
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile

test-distributed: install $(VENV)/.deepspeed
	$(BIN)/python -m pytest -q -m distributed tests/distributed

# Chromium as the system has it (apt-get install chromium), or what .venv/bin/playwright install chromium brings
test-browser: install $(VENV)/.browser
	$(BIN)/python -m pytest -q tests/report/browser.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

prepare: install
	$(BIN)/python -m trl.builtin prepare

install: $(VENV)/.installed

$(VENV)/.deepspeed: $(VENV)/.installed
	$(BIN)/pip install --quiet -c requirements.txt -e '.[deepspeed]'
	@touch $@

$(VENV)/.browser: $(VENV)/.installed
	$(BIN)/pip install --quiet -c requirements.txt -e '.[browser]'
	@touch $@

# torch first: a CPU build from a local package source if there is one; else, on Linux without an NVIDIA GPU,
# PyTorch's CPU wheels (the default there is a CUDA build of several GB); else whatever pip takes
$(VENV)/.installed: pyproject.toml requirements.txt requirements-builtin.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "relc needs Python 3.11 or newer; say which with: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  $(BIN)/pip install --quiet --no-deps --no-index '$(TORCH)' 2>/dev/null || \
	  { test "$$(uname -s)" = Linux && ! command -v nvidia-smi >/dev/null && \
	    $(BIN)/pip install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu '$(TORCH)'; } || true
	$(BIN)/pip install --quiet -c requirements.txt -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps -r requirements-builtin.txt
	@touch $@
