# `make demo`, `make test` and `make lint` do their own set-up: a virtual environment in VENV, made once.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
# The set-up is repeated when the interpreter or what the two distributions ask for changes, not when tool settings do.
KEY := $(shell { $(PYTHON) --version; sed -s '/^\[tool/,$$d' pyproject.toml sgl-kernel-lazy/pyproject.toml; } | sha256sum | cut -c1-12)
READY := $(VENV)/.ready-$(KEY)

.PHONY: demo test lint bench-smoke setup key

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

SMOKE := $(VENV)/bench-smoke

bench-smoke: $(READY) # the serving benchmark at tiny sizes, to see that all of it works
	rm -rf $(SMOKE)
	$(BIN)/python benchmark/serving/bench.py --model tiny --kv-pool-gb 0.1 --contenders lazy,materialize,stock \
		--plan benchmark/serving/plans/smoke.txt --out $(SMOKE)
	$(BIN)/python benchmark/serving/plots.py $(SMOKE) --out $(SMOKE)

setup: $(READY)

key: # names the environment, for caches
	@echo $(KEY)

$(READY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v < (3, 13) or sys.exit("Python 3.10 to 3.12 is needed, $(PYTHON) is %d.%d: name another with `make PYTHON=python3.12 ...`" % v)'
	@echo "Setting up $(VENV), once: SGLang and PyTorch, about 4 minutes and 9 GB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e ./sgl-kernel-lazy -e '.[dev]'
	@touch $@
