# Targets set themselves up: a virtual environment in VENV, made once.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
# The set-up is repeated when the interpreter or what the two distributions ask for changes, not when tool settings do.
KEY := $(shell { $(PYTHON) --version; sed -s '/^\[tool/,$$d' pyproject.toml sgl-kernel-lazy/pyproject.toml; } | sha256sum | cut -c1-12)
SGLANG_READY := $(VENV)/.ready-$(KEY)
# Beside them, as it needs nothing that they do not bring.
READY := $(VENV)/.ready-policies-$(shell sed '/^\[tool/,$$d' sglang-lazy-policies/pyproject.toml | sha256sum | cut -c1-12)

.PHONY: demo demo-exact test test-all test-nightly test-research lint format soak fuzz bench-smoke examples-smoke wheels wheels-smoke lint-deploy setup mooncake key

demo: $(READY)
	$(BIN)/python examples/demo.py

demo-exact: $(READY) # without a download
	$(BIN)/python examples/demo_exact.py

# Processes keep what they free: malloc would give back each large tensor's memory, and the kernel would clear it again.
KEEP := MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000

# Tests that share a server share a worker; those of the servers come first, as they take longest.
PYTEST := $(KEEP) $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

test: $(READY) # in minutes
	$(PYTEST) -m 'not slow and not nightly'

# The router of docs/routing.md, which needs none of our packages.
SMG := $(VENV)/smg
SMG_READY := $(SMG)/.ready-$(shell sha256sum benchmark/routing/requirements.txt | cut -c1-12)

$(SMG_READY): $(READY)
	$(PYTHON) -m venv --clear $(SMG)
	$(SMG)/bin/python -m pip install --quiet -r benchmark/routing/requirements.txt
	@touch $@

# The storage of test/e2e/test_mooncake.py, which servers import: beside their environment, as nothing else should.
MOONCAKE := $(VENV)/mooncake
MOONCAKE_READY := $(MOONCAKE)/.ready-$(shell sha256sum test/e2e/mooncake-requirements.txt | cut -c1-12)

mooncake: $(MOONCAKE_READY)

$(MOONCAKE_READY): $(READY)
	rm -rf $(MOONCAKE)
	@# SGLang needs its dependencies, too.
	$(BIN)/python -m pip install --quiet --no-deps --target $(MOONCAKE) -r test/e2e/mooncake-requirements.txt
	@touch $@

test-all: $(READY) $(SMG_READY) $(MOONCAKE_READY) # of the product
	$(PYTEST) -m 'not nightly'

test-nightly: $(READY) $(SMG_READY) $(MOONCAKE_READY) # with every variant, and every scenario on every model
	$(PYTEST)

test-research: $(READY)
	$(PYTEST) research/test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA)
	$(BIN)/lint-imports
	$(BIN)/mypy

CUDA = $(shell find sgl-kernel-lazy/sgl_kernel_lazy/csrc -type f)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA)

# Programs that start many tiny servers: as forks, like tests', where there is no GPU.
FORKED := $(KEEP) PYTHONPATH=test:$$PYTHONPATH $(BIN)/python -m support

MINUTES ?= 15

soak: $(READY) # small servers under hostile traffic, every answer held against the oracle
	$(FORKED) benchmark.soak --minutes $(MINUTES)

REQUESTS ?= 10000
SEED ?= 0

fuzz: $(READY) # requests that are wrong in something, to every route but an operator's
	LAZY_FUZZ_REQUESTS=$(REQUESTS) $(BIN)/python -m pytest test/e2e/test_fuzz.py -s --hypothesis-seed=$(SEED) -o faulthandler_timeout=1800

SMOKE := $(VENV)/bench-smoke

bench-smoke: $(READY) # the serving benchmark at tiny sizes, to see that all of it works
	rm -rf $(SMOKE)
	$(FORKED) benchmark.serving.bench --model tiny --kv-pool-gb 0.1 --contenders lazy,copy,lazy@base+query:ratio=0.2,stock \
		--plan benchmark/serving/plans/smoke.txt --out $(SMOKE)
	$(BIN)/python -m benchmark.serving.plots $(SMOKE) --out $(SMOKE)

FRAMEWORKS := $(VENV)/frameworks
FRAMEWORKS_READY := $(FRAMEWORKS)/.ready-$(shell sha256sum examples/frameworks/requirements.txt | cut -c1-12)

examples-smoke: $(FRAMEWORKS_READY) # the clients of examples/frameworks against a tiny server
	$(KEEP) $(BIN)/python .ci/clients.py $(FRAMEWORKS)/bin/python

$(FRAMEWORKS_READY): $(READY)
	$(PYTHON) -m venv --clear $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install --quiet -r examples/frameworks/requirements.txt
	@touch $@

wheels: $(READY) # the three distributions, in dist/
	rm -rf dist build sgl-kernel-lazy/build sglang-lazy-policies/build # setuptools would pack what an earlier build left there
	$(BIN)/python -m build --wheel --outdir dist sgl-kernel-lazy
	$(BIN)/python -m build --wheel --outdir dist sglang-lazy-policies
	$(BIN)/python -m build --wheel --outdir dist .
	$(BIN)/python .ci/missing_from_wheels.py dist/*.whl

WHEELS_SMOKE := $(abspath $(VENV))/wheels-smoke

wheels-smoke: wheels # the exact demo in an empty environment, outside of the checkout, with nothing of ours but the wheels
	rm -rf $(WHEELS_SMOKE)
	$(BIN)/python -m venv $(WHEELS_SMOKE)
	@# With PYTHONPATH set, pip would take the checkout for the installed distributions.
	env -u PYTHONPATH $(WHEELS_SMOKE)/bin/python -m pip install --no-deps dist/*.whl
	@# Dependencies are those of VENV. Its .pth files do not count here, so neither do its editable installs.
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(WHEELS_SMOKE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
	cp -r examples $(WHEELS_SMOKE)
	cd $(WHEELS_SMOKE) && env -u PYTHONPATH bin/python examples/demo_exact.py

LINTERS := $(VENV)/linters
LINTERS_READY := $(LINTERS)/.ready-$(shell sha256sum .ci/linters.txt | cut -c1-12)

lint-deploy: $(LINTERS_READY) # image, compose file, manifests, unit
	.ci/lint-deploy $(LINTERS)

$(LINTERS_READY): $(READY)
	$(PYTHON) -m venv --clear $(LINTERS)
	$(LINTERS)/bin/python -m pip install --quiet -r .ci/linters.txt
	@touch $@

setup: $(READY)

key: # names the environment, for caches
	@echo $(KEY)

$(READY): $(SGLANG_READY)
	@# With PYTHONPATH set, pip would take the checkout for the installed distributions.
	env -u PYTHONPATH $(BIN)/python -m pip install --quiet --no-deps -e ./sglang-lazy-policies
	@touch $@

$(SGLANG_READY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit("Python 3.11 to 3.13 is needed, $(PYTHON) is %d.%d: name another with `make PYTHON=python3.12 ...`" % v)'
	@echo "Setting up $(VENV), once: SGLang and PyTorch, about 4 minutes and 9 GB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e ./sgl-kernel-lazy -e '.[dev]'
	@touch $@
