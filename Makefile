# make train · make test · make test-long · make claims · make test-gpu · make claims-gpu · make bench
# The first interpreter that really runs (a pyenv shim can exist and fail) makes .venv.
probe = import ensurepip, venv, sys; assert sys.version_info >= (3, 12)
pyenv = $${PYENV_ROOT:-$$HOME/.pyenv}
find_python = for p in python3.13 python3.12 python3 $$(ls -d $(pyenv)/versions/*/bin/python3 2>/dev/null | sort -rV); do \
	"$$p" -c '$(probe)' >/dev/null 2>&1 && { echo "$$p"; exit 0; }; done; \
	echo "no Python >= 3.12 with venv found: install one (e.g. apt install python3.12-venv)" >&2; exit 1

PYTHON ?= .venv/bin/python
CONFIG ?= configs/tiny.yaml
ARGS ?=
GPUS ?= 1

.PHONY: train test test-long claims lint test-gpu claims-gpu bench clean

train: .venv/base
	$(PYTHON) -m models.train $(CONFIG) $(ARGS)

test: lint
	$(PYTHON) -m pytest -n 2 --claims $(ARGS)

# Of these tests those that check what the README claims, and a table of what holds.
claims: .venv/test
	$(PYTHON) -m pytest -n 2 -m claim --claims $(ARGS)

# Thousands of random scans instead of hundreds: about half an hour.
test-long: .venv/test
	EXAMPLES=5000 $(PYTHON) -m pytest -n 2 tests/test_random_scans.py $(ARGS)

lint: .venv/test
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

# The GPU targets install nothing: PYTHON=python3 uses the machine's own packages.
# Twelve processes (pytest-xdist's) share the GPU and compile beside each other: three minutes. pytest-benchmark, where
# it is installed, warns of them, and a warning is an error.
test-gpu:
	$(PYTHON) -m pytest -m gpu -n 12 -p no:benchmark $(ARGS)

# PART=1/4: a quarter of the claims that need an H200, in at most 8 minutes; GPUS=2 PART=1/2: half of what needs two.
claims-gpu:
	$(PYTHON) -m benchmarks.claims $(if $(PART),--part $(PART)) --gpus $(GPUS) $(ARGS)

bench:
	$(PYTHON) -m benchmarks.dense $(ARGS)

.venv/bin/python:
	@python=$$($(find_python)) && echo "using $$python" && "$$python" -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip

.venv/base: .venv/bin/python pyproject.toml
	.venv/bin/python -m pip install -q -e .
	touch $@

.venv/test: .venv/bin/python pyproject.toml
	.venv/bin/python -m pip install -q -e '.[test]'
	touch .venv/base $@

clean:
	rm -rf .venv runs
