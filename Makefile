# The menu of commands that README and CI use. Each makes the environment it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NATIVE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/isa/* csrc/emulation/*)
WORKERS ?= 2

.PHONY: help test test-slow test-lower emulate clients sanitize check format law cases paging cache-gain steering step-times growth simulation bench docs golden clean

help: ## show this menu
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

test: $(READY) ## the whole default test suite, with the real models where they can be fetched
	-$(BIN)/octavo pull smollm2-135m
	-$(BIN)/octavo pull gemma3-270m
	$(BIN)/pytest -n $(WORKERS) -m "not slow"

test-slow: $(READY) ## soaks and long Hypothesis profiles
	$(BIN)/pytest -n $(WORKERS) -m slow

test-lower: ## the tests that need no real model, with the oldest supported dependencies
	$(MAKE) VENV=.venv-lower .venv-lower/.lower
	.venv-lower/bin/pytest -n $(WORKERS) -m "not slow and not real"

.venv-lower/.lower: pyproject.toml tools/lower_bounds.py
	$(PYTHON) -m venv .venv-lower
	$(PYTHON) tools/lower_bounds.py pyproject.toml > .venv-lower/lower.txt
	.venv-lower/bin/pip install --quiet --constraint .venv-lower/lower.txt --editable '.[dev]'
	touch $@

emulate: $(READY) ## tests of the kernels with AVX-512 and AMX emulated
	tools/emulate.sh $(BIN)/python

clients: $(READY) .venv-clients/.ready .venv-lm-eval/.ready ## other people's clients against a live server
	$(BIN)/octavo pull smollm2-135m
	.venv-clients/bin/pytest -c tests/clients/pytest.ini --octavo $(BIN)/octavo tests/clients \
		--ignore tests/clients/test_lm_eval.py
	.venv-lm-eval/bin/pytest -c tests/clients/pytest.ini --octavo $(BIN)/octavo \
		tests/clients/test_lm_eval.py

.venv-clients/.ready: tests/clients/constraints.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/pip install --quiet --constraint $< openai langchain-openai litellm llm pytest
	touch $@

.venv-lm-eval/.ready: tests/clients/constraints.txt
	$(PYTHON) -m venv .venv-lm-eval
	.venv-lm-eval/bin/pip install --quiet --constraint $< 'lm_eval[api]' pytest
	touch $@

sanitize: $(READY) ## tests of the native library under address and undefined-behaviour sanitizers
	tools/sanitize.sh $(BIN)/python

check: $(READY) ## format, lint, strict types, import layers, docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/reference_docs.py --check
	$(BIN)/mkdocs build --strict --quiet

format: $(READY) ## bring the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

law: $(READY) ## same request, same bits: print every cell and its differing bits
	$(BIN)/python -m tests.law

cases: $(READY) ## which fault of shared/cases.md is tested where, or why not yet
	$(BIN)/pytest --cases -q

paging: $(READY) ## waste, concurrency, sharing and scheduler cost on real traces
	$(BIN)/python benchmarks/paging.py

cache-gain: $(READY) ## generating with and without the KV cache, in flops and seconds
	$(BIN)/python benchmarks/cache_gain.py

steering: $(READY) ## time between tokens while prompts arrive, with --target-itl-ms and without
	$(BIN)/python benchmarks/steering.py

step-times: $(READY) ## predicted and measured times of steps over batch, context and chunk
	$(BIN)/python benchmarks/step_times.py

growth: $(READY) ## decoding over batch and context, prompts over length, beside their bounds
	$(BIN)/python -m benchmarks.growth

TRACE ?= azure_conv.csv
simulation: $(READY) ## a simulated run beside a real one; TRACE=azure_conv.csv
	$(BIN)/python benchmarks/simulation.py --trace $(TRACE)

WORK ?=
PEERS ?=
BENCH ?=
bench: $(READY) ## Octavo and its peers side by side; WORK="decode-8 start" PEERS="octavo llama" BENCH=--quick
	$(BIN)/python -m benchmarks.peers --work "$(WORK)" --peers "$(PEERS)" $(BENCH)

docs: $(READY) ## build the documentation into site/
	$(BIN)/python tools/reference_docs.py
	$(BIN)/mkdocs build --strict

golden: ## how to make the golden files again
	@cat tests/golden/README.md

clean: ## remove what the commands above made
	rm -rf $(VENV) .venv-lower .venv-clients .venv-lm-eval site .pytest_cache .mypy_cache .ruff_cache .hypothesis
