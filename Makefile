# `make serve` and `make test` each do all set-up on a fresh Linux machine with Python >= 3.10.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
KERNELS := kernels/libalignedserve_kernels.so
TORCH := torch==2.13.0

# For the tests of the store in Redis: found on the path, or Debian's, unpacked here.
REDIS := build/redis
.PHONY: serve redis test test-again soak digests-everywhere setup lint types demo-model eval-demo-model examples clean
.DEFAULT_GOAL := test
# Of `alignedserve serve`: make serve ARGS="--topology 1+1 --port 9000"
ARGS ?=

setup: $(READY) $(KERNELS)

# torch first and pinned, so that every machine tests the same one. Where pip's index has a CPU build of it (as +cpu),
# pip takes that; from the public index it is the CUDA build, of some gigabytes.
$(READY): pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The editable install has built it; what changed since then is built here. Where that fails, torch computes.
$(KERNELS): kernels/build.py $(wildcard kernels/csrc/*) | $(READY)
	$(BIN)/python -m alignedserve.kernels.build --optional

serve: $(READY) $(KERNELS)
	@exec $(BIN)/alignedserve serve $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Where there is none to be had, those tests skip and say so; in CI they fail.
redis:
	@command -v redis-server > /dev/null || test -x $(REDIS)/usr/bin/redis-server || \
	  tests/get_redis.sh $(REDIS) || echo "no redis-server: the tests that need one will skip"

# In two processes: of those that start whole deployments one runs all (tests/conftest.py).
test: $(READY) $(KERNELS) redis lint types
	$(BIN)/pytest -n 2 --dist loadfile

# What failed in the last run, by itself.
test-again: $(READY) $(KERNELS) redis
	$(BIN)/pytest --last-failed --last-failed-no-failures none

# The same tests with larger numbers: every prompt of the evaluation, thousands of generated conversations. And other
# people's clients, each in a virtual environment under build/third_party that is made from the index where it is missing.
soak: $(READY) $(KERNELS) redis lint types
	SOAK=1 $(BIN)/pytest

# Whether runs are the same, byte for byte, under other versions of Python, which have to be there.
PYTHONS ?= python3.10 python3.12 python3.13
digests-everywhere:
	set -e; for python in $(PYTHONS); do \
	  $$python -m venv build/digests/$$(basename $$python); \
	  build/digests/$$(basename $$python)/bin/pip --quiet install msgspec; \
	  build/digests/$$(basename $$python)/bin/python -m tests.simulator.digests --check; \
	done

demo-model: $(READY)
	$(BIN)/python tools/train_demo_model.py

eval-demo-model: $(READY)
	$(BIN)/python tools/eval_demo_model.py

examples: $(READY)
	$(BIN)/python tools/make_examples.py

clean:
	rm -rf $(VENV) $(KERNELS) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
