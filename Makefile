# Needs Python >= 3.10, make and pip; everything else goes into .venv.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The site is made of text: what builds it is kept apart, and needs no torch.
DOCS_VENV ?= .venv-docs
DOCS_INSTALLED := $(DOCS_VENV)/.installed
DEEPSPEED := .deepspeed
DEEPSPEED_INSTALLED := $(DEEPSPEED)/.installed
MEGATRON := .megatron
MEGATRON_INSTALLED := $(MEGATRON)/.installed
OLDEST_VENV ?= .venv-oldest
OLDEST_INSTALLED := $(OLDEST_VENV)/.installed
# What needs no other package, and every wrapper of torch and fairscale. The two that are left out test the site and the distributions.
NOT_ON_OLDEST := website packaging
SAVE_AND_LOAD := save_load_matrix saved_states load_while_training bytes_of_ranks extra load_refused load_fails check_of_load
TESTS_OF_OLDEST := tests/unit $(NOT_ON_OLDEST:%=--ignore tests/unit/test_%.py) tests/checkpoint/test_training_resumes.py \
	$(SAVE_AND_LOAD:%=tests/checkpoint/test_%.py) tests/adapters/test_torch_wrappers.py tests/adapters/test_torch_names.py \
	tests/adapters/test_torch_mixes.py tests/adapters/test_fairscale_reshard.py
# Processes that run tests, each a file at a time, on ranks of its own. Each takes five seconds to import everything.
test: JOBS ?= 3
# Here five keep two cores busy, because some tests wait.
test-all test-oldest test-long: JOBS ?= 5

.PHONY: help venv deepspeed megatron test test-all test-gpu test-hosts test-long test-oldest check format demo bench docs soak package clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(INSTALLED)  ## make .venv with the pinned requirements and this package

# --no-deps: setup.cfg gives ranges, and the pins above are what counts here.
$(INSTALLED): requirements-dev.txt requirements-dev-nodeps.txt pyproject.toml setup.cfg
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-dev-nodeps.txt
	rm -rf $(VENV)/lib/python*/site-packages/tests $(VENV)/lib/python*/site-packages/scripts  # of verl, in the way of ours
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

deepspeed: $(DEEPSPEED_INSTALLED)  ## put DeepSpeed beside the tests, whose engine one of them needs

# In a folder of its own, because Accelerate and others change what they do where they can import it. Where it cannot be installed,
# its test is skipped.
$(DEEPSPEED_INSTALLED): requirements-deepspeed.txt $(INSTALLED)
	rm -rf $(DEEPSPEED)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(DEEPSPEED) \
		-r requirements-deepspeed.txt && touch $@ || { rm -rf $(DEEPSPEED); echo "DeepSpeed cannot be installed: its test is skipped"; }

megatron: $(MEGATRON_INSTALLED)  ## put megatron-core beside the tests, at whose layers one of them looks

$(MEGATRON_INSTALLED): requirements-megatron.txt $(INSTALLED)
	rm -rf $(MEGATRON)
	$(BIN)/python -m pip install --quiet --no-deps --target $(MEGATRON) -r requirements-megatron.txt && touch $@ \
		|| { rm -rf $(MEGATRON); echo "megatron-core cannot be installed: its test is skipped"; }

# Ranks import the tests, so that bytecode that is not written is compiled again and again.
test test-all test-hosts test-long: export PYTHONDONTWRITEBYTECODE =

test: venv  ## run the quick tests, in JOBS= processes (3): all subjects, in less than 5 minutes on 2 cores
	$(BIN)/python -m pytest --quick -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-all: venv deepspeed megatron  ## run the complete suite, but for what takes minutes, in JOBS= processes (5)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-gpu: venv  ## run the tests that need a GPU, over NCCL
	$(BIN)/python -m pytest -m nccl

test-hosts: venv  ## run the tests on benches of several hosts (root; glusterfs-server, sshfs, openssh-server and faketime of Debian)
	$(BIN)/python -m pytest -m hosts tests/hosts

test-oldest: $(OLDEST_INSTALLED)  ## run what the oldest supported torch has to do, in a venv of its own (PYTHON= should be 3.10)
	$(OLDEST_VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(TESTS_OF_OLDEST)

$(OLDEST_INSTALLED): requirements-oldest.txt pyproject.toml setup.cfg
	@test -n "$(PYTHON)" || { echo "Python 3.10 is needed: make PYTHON=/path/to/python3.10"; exit 1; }
	test -x $(OLDEST_VENV)/bin/python || $(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --quiet -r requirements-oldest.txt
	$(OLDEST_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

test-long: venv  ## run what takes minutes: all pairs of wrappers, every optimizer, many deaths, many random layouts
	EXAMPLES=20 $(BIN)/python -m pytest tests/unit/test_plan.py tests/unit/test_boxes.py tests/unit/test_placements.py tests/unit/test_layout.py
	$(BIN)/python -m pytest -m slow -n $(JOBS) --dist loadfile --no-loadscope-reorder --random-order-bucket=class

check: venv  ## formatting, linting, types, and the examples in the docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --doctest-modules fsdp_optim tests/interop/test_docs.py --ignore=fsdp_optim/integrations  # which import their trainers

format: venv  ## format the code and sort its imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: venv  ## train, save, resume at other world sizes, compare
	$(BIN)/python -m demo

bench: venv  ## time and memory of a gather, beside fairscale's own
	$(BIN)/python benchmarks/gather.py

docs: $(DOCS_INSTALLED)  ## build the docs site into build/docs/site; broken links and missing docstrings fail
	$(DOCS_VENV)/bin/python -m website

$(DOCS_INSTALLED): requirements-docs.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10 or newer is needed: make PYTHON=/path/to/python3"; exit 1; }
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet -r requirements-docs.txt
	@touch $@

soak: venv  ## torture checkpoints for SOAK_SECONDS= seconds (600); SEED= runs the same cases again
	$(BIN)/python -m tests.soak

package: venv  ## build the wheel and the sdist into dist/, and check them
	rm -rf dist
	$(BIN)/python -m release.build --out dist $(if $(REPOSITORY),--repository $(REPOSITORY)) $(if $(REF),--ref $(REF)) $(if $(TAG),--tag $(TAG))

clean:  ## remove what the other targets made
	rm -rf $(VENV) $(DOCS_VENV) $(OLDEST_VENV) $(DEEPSPEED) $(MEGATRON) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
