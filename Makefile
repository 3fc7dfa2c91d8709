# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
KILLS ?= 200
MINUTES ?= 25
SEEDS ?= 10
PROMPTS := "a 3 moves left" "a seven moves up" "the digit 5 goes right" "a zero slides to the bottom" \
	"a handwritten two drifts leftwards" "to the top moves a nine" "a four that moves down" "the number 6 slides to the right"

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Test workers share the cores: one thread each, and tests that train ask for more themselves.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-browser check fmt bench matrix venv torture fuzz

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: .venv/.base ## train a small text-to-video model on handwritten digits on the CPU, evaluate it, draw clips
	@echo "── training phenaki-tiny into runs/demo (the same command resumes an interrupted run)"
	$(BIN)/kineo train phenaki-tiny --run runs/demo
	@echo "── evaluating it"
	$(BIN)/kineo evaluate runs/demo --metrics caption_accuracy,reconstruction,codebook,loss
	@echo "── drawing"
	$(BIN)/kineo sample runs/demo $(PROMPTS) --out runs/demo/clips
	@echo "── writing the report"
	$(BIN)/kineo report runs/demo -o runs/demo-report.html
	@echo "── look at the GIFs and the sheet above, or open runs/demo-report.html; runs/demo/evaluation has a sheet with each clip's verdict"

test: check ## everything that must hold before a commit: style, types, import contracts, tests
	@echo "── tests"  # worksteal: the tests of a file stay with one worker, which makes what they share once
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: .venv/.dev ## the tests that take minutes or want a GPU
	$(BIN)/python -m pytest -q -m "slow and not gpu" --timeout 1800 $(ARGS)
	$(BIN)/python -m pytest -q -m gpu --timeout 1800 $(ARGS)

test-browser: .venv/.dev ## the studio's pages in a headless Chromium, which is installed if it is missing
	@command -v chromium chromium-browser google-chrome > /dev/null || $(BIN)/python -m playwright install --with-deps chromium
	$(ONE_THREAD) $(BIN)/python -m pytest -q -m browser $(ARGS)

check: .venv/.dev ## style, types, import contracts
	@echo "── style"
	$(BIN)/ruff format --quiet --check .
	$(BIN)/ruff check --quiet .
	@echo "── types"
	$(BIN)/mypy --no-error-summary
	@echo "── import contracts"
	$(BIN)/lint-imports --no-logo

fmt: .venv/.dev ## format, and repair what can be repaired
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format .

bench: .venv/.dev ## time optimizer steps and sampling calls: make bench ARGS="--help"
	$(BIN)/python -m benchmarks $(ARGS)

matrix: .venv/.dev ## compare every family under every layout of processes with one process; writes the table in docs/parallel.md
	$(ONE_THREAD) $(BIN)/python -m tests.parallel.matrix

torture: .venv/.dev ## kill runs at random and cause every other fault: make torture KILLS=200 MINUTES=25 ARGS="--help"
	$(ONE_THREAD) $(BIN)/python -m tests.torture --kills $(KILLS) --minutes $(MINUTES) $(ARGS)

fuzz: .venv/.dev ## damaged and hostile input for everything that reads: make fuzz SEEDS=10 MINUTES=60 ARGS="--help"
	$(ONE_THREAD) $(BIN)/python -m tests.fuzz --seeds $(SEEDS) --minutes $(MINUTES) $(ARGS)

venv: .venv/.dev ## only set up .venv, with everything that the other targets need

# Set-up ----------------------------------------------------------------------------------------------------------

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Kineograph needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "── making a virtual environment in .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { \
		echo "$(PYTHON) could not make a virtual environment: install its venv module (Debian, Ubuntu: python3-venv)." >&2; exit 1; }

# Demo needs the base install only; development adds its tools to it. Either is renewed when what it installs has changed.
.venv/.base: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "── installing Kineograph and what it needs (a few minutes the first time)"
	@$(PIP) -e .
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "── installing Kineograph, what it needs, and the development tools (a few minutes the first time)"
	@$(PIP) -e ".[dev,wandb,http,metrics,cogvideox,parquet,studio]"
	@touch .venv/.base $@
