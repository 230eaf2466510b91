# Everything runs in .venv; each target makes what it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
DOCS_STAMP := .venv/.installed-docs
OUT ?= demo-output
# Most installed modules are never imported: what is, is compiled then, and kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo compare test suite lint style types warm check bench docs dist clean
help:
	@echo "make demo   the main job on a fresh machine: four servers, one answer in three ways"
	@echo "make compare  calibrate, plan for ten servers, generate and compare under the cost model"
	@echo "make test   everything CI runs"
	@echo "make check  lint, format, types, import rules and the fast tests"
	@echo "make docs   the documentation site, in site/"
	@echo "make bench  what it costs: calibration, decisions, the model view; beside llama.cpp with PEERS=DIR"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e ".[docs]"
	@touch $@

demo: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh "$(OUT)"

compare: $(STAMP)
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/compare.sh "$(OUT)"

check: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

# What is quick to say no comes first; types are checked beside the tests, some of which wait for
# processes.
test: style
	@$(MAKE) --no-print-directory -j 2 types suite

lint: style types

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/pyright

# Two processes more than cores: servers and clocks are waited for.
suite: warm
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

warm: $(STAMP)
	$(BIN)/python -m compileall -q src tests
	@$(MAKE) --no-print-directory -j 2 warm-steps warm-decisions

warm-%: $(STAMP)
	$(BIN)/python scripts/warm.py $*

bench: $(STAMP)
	$(BIN)/python benchmarks/run_all.py --output bench-output $(if $(PEERS),--peers $(PEERS))

# What the theme says about its successor is nothing that readers of this have to know.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# What is released: an archive of the sources and a wheel.
dist: $(STAMP)
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build

clean:
	rm -rf .venv .cache dist site demo-output bench-output
