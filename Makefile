# Every target does the set-up that it needs; `make` alone lists them.

VENV := .venv
BIN := $(VENV)/bin
PYTHONS := python3 python3.13 python3.12 python3.11 python3.10 python3.14
CARGO_SOURCES := $(shell find Cargo.toml Cargo.lock rust -name '*.rs' -o -name 'Cargo.*' 2>/dev/null)

# The extension is built, linted and tested against this one interpreter.
export PYO3_PYTHON := $(abspath $(BIN)/python)

# Where the interpreter's shared library is, which the extension's Rust tests link with; many systems have none.
LIBPYTHON = $(shell $(BIN)/python -c 'import pathlib, sysconfig; \
	folder, name = map(sysconfig.get_config_var, ("LIBDIR", "LDLIBRARY")); \
	print(folder if name.endswith(".so") and pathlib.Path(folder, name).exists() else "")')
TESTED_CRATES = $(if $(LIBPYTHON),--workspace,--package gradclip-core)

say = @printf '\n== %s\n' "$(1)"

.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help setup demo images wheel test memcheck bench bench-sharded bench-gpu lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv: torch, the tools, and gradclip built from this tree

$(VENV)/.python:
	@command -v cargo >/dev/null || { \
		echo "setup: cargo is missing; install Rust 1.89 or later (rustup) and run make again"; exit 1; }
	@for python in $(PYTHONS); do \
		if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' \
			2>/dev/null; then \
			echo "== making $(VENV) with $$($$python --version)"; \
			$$python -m venv $(VENV) && touch $@ && exit 0; exit 1; \
		fi; \
	done; \
	echo "setup: no Python 3.10 to 3.14 with the venv module was found among: $(PYTHONS)"; exit 1

# torch comes first and alone: it is the large download, and the build may use what it brings.
$(VENV)/.torch: $(VENV)/.python
	$(call say,installing torch and maturin (torch is a download of gigabytes the first time))
	@$(BIN)/python -m pip install --upgrade pip 'maturin>=1.9,<2' 'torch>=2.10'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml $(CARGO_SOURCES)
	$(call say,building gradclip and installing it with its tools (a minute or two the first time))
	@$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[test,demo,bench,lint]'
	@touch $@

demo: setup ## train a small transformer with every step clipped, then compare the norms
	@$(BIN)/python -m examples.demo

test: setup lint ## set up, lint and run every test
	$(call say,tests in Rust)
	@export LD_LIBRARY_PATH="$(LIBPYTHON):$$LD_LIBRARY_PATH"; \
	if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run $(TESTED_CRATES); \
	else \
		cargo test $(TESTED_CRATES) --quiet; \
	fi
	$(call say,tests over several processes)
	@$(BIN)/python -m pytest -m distributed
	$(call say,tests of the kernels in the interpreter)
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels
	$(call say,tests in one process)
	@$(BIN)/python -m pytest -n 2 -m 'not distributed' --ignore tests/kernels

images: setup ## compile the CUDA kernels of this tree, by the Triton of .venv, into kernels/images
	@$(BIN)/python -m kernels.ahead_of_time

wheel: setup ## the wheel with its kernel images, by the pinned Triton (a large download), in dist
	@$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

lint: setup ## formatting, lints and types, of Rust and Python
	$(call say,format and lints of Rust)
	@cargo fmt --all --check
	@cargo clippy --workspace --all-targets --quiet -- -D warnings
	$(call say,format and lints and types of Python)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# Undefined values are not asked about: the optimiser reads the payload of an empty Option early.
memcheck: ## the tests of the Rust core under valgrind: no access out of bounds
	@CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='valgrind -q --undef-value-errors=no --error-exitcode=9' \
		cargo test --package gradclip-core

format: setup ## rewrite the sources in the house style
	@cargo fmt --all
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## gradclip beside torch on this machine's CPU: a table and JSON
	@$(BIN)/python -m benches.cpu

bench-sharded: setup ## the clip over gloo ranks beside torch: a table and JSON
	@$(BIN)/python -m benches.sharded

bench-gpu: setup ## gradclip beside torch on this machine's GPU: a table and JSON
	@$(BIN)/python -m benches.gpu

clean: ## remove what was built (.venv and cargo's downloads stay)
	cargo clean
	rm -rf dist kernels/images .pytest_cache .ruff_cache .mypy_cache .hypothesis $(VENV)/.installed
	find python -name '_core*.so' -delete
