# `make demo` and `make test` do all their own set-up; they need Python 3.11 and make.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder
COLLECTION := fleet/ansible_collections/ddtree/sglang_overlay

.DEFAULT_GOAL := help
.PHONY: help demo test test-full lint type format bench bundle manifests clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.base: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.txt
	@touch $@

$(VENV)/.test: requirements-test.txt requirements-engine.txt $(VENV)/.base
	$(BIN)/python -m pip install -q -r requirements-test.txt -r requirements-engine.txt
	@touch $@

demo: $(VENV)/.base  ## apply, verify, re-apply and revert on the real pinned wheel (under 2 minutes)
	@$(BIN)/python devtools/demo.py

test: lint  ## lint, types and every test that CI runs
	$(PYTEST) -m "not gpu and not full"

test-full: lint  ## the long runs too (kills, write errors, property tests at full size)
	$(PYTEST) -m "not gpu"

lint: $(VENV)/.test  ## ruff, mypy (strict) and ansible-lint (production)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	cd $(COLLECTION) && PATH=$(CURDIR)/$(BIN):$$PATH HOME=$(CURDIR)/.cache/ansible-home \
	  ANSIBLE_COLLECTIONS_PATH=$(CURDIR)/fleet ansible-lint --offline --profile production -q .

format: $(VENV)/.test  ## let ruff format the tree
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.test  ## measure apply and verify side by side (writes benchmarks/results)
	$(BIN)/python benchmarks/engine_speed.py

bundle: $(VENV)/.base  ## build dist/sglang-overlay.pyz: one file, needs only Python 3.10 or newer
	$(BIN)/python devtools/bundle.py

manifests: $(VENV)/.base  ## regenerate patches/*/manifests from the released wheels
	$(BIN)/python devtools/manifests.py

clean:  ## remove everything that these targets made
	rm -rf $(VENV) .cache .run dist
