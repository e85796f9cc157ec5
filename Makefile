# make train · make test · make test-avx2 · make test-all · make test-oldest · make test-long · make lint · make docs
# make recipes · make test-gpu · make claims-gpu · make bench
# .venv is made by the first interpreter that runs: a pyenv shim can exist and fail.
probe = import ensurepip, venv, sys; assert sys.version_info >= (3, 12)
pyenv = $${PYENV_ROOT:-$$HOME/.pyenv}
find_python = for p in python3.13 python3.12 python3 $$(ls -d $(pyenv)/versions/*/bin/python3 2>/dev/null | sort -rV); do \
	"$$p" -c '$(probe)' >/dev/null 2>&1 && { echo "$$p"; exit 0; }; done; \
	echo "no Python >= 3.12 with venv found: install one (e.g. apt install python3.12-venv)" >&2; exit 1

# At most four: one takes some 2 GB.
workers = -n auto --maxprocesses 4 --dist worksteal

PYTHON ?= .venv/bin/python
# What is installed, and where. Another PYTHON brings its own packages, except the oldest jax, which goes to .oldest.
ifeq ($(PYTHON),.venv/bin/python)
base = .venv/$(EXTRAS)
tools = .venv/test
sphinx = .venv/docs
cuda = .cuda/made
with_cuda = PYTHONPATH=.cuda
endif
# The lower bound of jax.
oldest = $(shell sed -n 's/^ *"jax>=\([0-9.]*\)".*/\1/p' pyproject.toml)
contract = $(addprefix tests/test_,contract.py rules.py scan.py rounding.py)
CONFIG ?= configs/tiny.yaml
# What `make train` installs: train,cuda13 has JAX for NVIDIA GPUs, which PyPI's jax alone is not.
EXTRAS ?= train
ARGS ?=
GPUS ?= 1

# Frameworks that the tests do not install. The rest of MaxText's list is what its decoders and its train.py import.
levanter = --pre marin-levanter==0.2.227.dev40316220070
maxtext = maxtext==0.2.5 aqtp chex datasets drjax flax gcsfs grain jinja2 ml_collections omegaconf optax \
	orbax-checkpoint pathwaysutils pillow pydantic qwix sentencepiece sympy tiktoken tokamax transformers
axlearn = aqtp attrs chex flax optax

.PHONY: train docs test test-avx2 test-all test-oldest test-long recipes lint test-gpu claims-gpu bench clean

train: $(base)
	$(PYTHON) -m models.train $(CONFIG) $(ARGS)

# Four minutes on two cores: all except the slow tests and those that need JAX's CUDA plugin.
test: lint
	$(PYTHON) -m pytest $(workers) -m "not slow and not long" $(ARGS)

# The same with what an x86 CPU without AVX-512 has. XLA generates code for it; oneDNN, which multiplies matrices, asks the
# CPU itself, and has a variable of its own.
test-avx2: $(tools)
	XLA_FLAGS="$$XLA_FLAGS --xla_cpu_max_isa=AVX2" ONEDNN_MAX_CPU_ISA=AVX2 \
		$(PYTHON) -m pytest $(workers) -m "not slow and not long" $(ARGS)

test-all: lint $(cuda) $(if $(ARGS),,test-oldest)
	$(with_cuda) $(PYTHON) -m pytest $(workers) -m "not long" $(ARGS)

# The contract, and layers in other styles, with the oldest jax that pyproject.toml allows.
test-oldest: .oldest/made
	PYTHONPATH=.oldest $(PYTHON) -c 'import jax; assert jax.__version__ == "$(oldest)", jax; print("jax $(oldest):")'
	PYTHONPATH=.oldest $(PYTHON) -m pytest $(workers) -m "not long" $(contract)

# The combinations of which `test-all` runs a few, and thousands of random scans rather than 32: over an hour.
test-long: $(tools) $(cuda)
	$(with_cuda) $(PYTHON) -m pytest $(workers) -m long $(ARGS)
	EXAMPLES=5000 $(PYTHON) -m pytest $(workers) tests/test_random_scans.py

# docs/recipes/ with each framework, in an environment of its own: 4 GB on disk. AXLEARN=folder: a checkout of AXLearn,
# which PyPI does not have; without it, its recipe is skipped.
recipes: $(tools) .recipes/levanter/made .recipes/maxtext/made $(if $(AXLEARN),.recipes/axlearn/made)
	$(PYTHON) -m pytest tests/recipes $(ARGS)

lint: $(tools)
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff check --preview --select PLR0917 jaxoffload  # at most six positional parameters
	$(PYTHON) -m mypy

# Strict: a warning, such as a broken link, is an error.
docs: $(sphinx)
	$(PYTHON) -m sphinx -q -W --keep-going -n docs docs/_build

# The GPU targets install nothing.
# Twelve pytest-xdist processes share the GPU and compile in parallel: three minutes. pytest-benchmark, if installed,
# warns about them, and a warning is an error.
test-gpu:
	$(PYTHON) -m pytest -m gpu -n 12 -p no:benchmark $(ARGS)

# Reruns the commands that benchmarks/results/ names. PART=1/4: a quarter of those for one GPU; GPUS=2: those for two.
claims-gpu:
	$(PYTHON) -m benchmarks.remeasure $(if $(PART),--part $(PART)) --gpus $(GPUS) $(ARGS)

bench:
	$(PYTHON) -m benchmarks.dense $(ARGS)

.venv/bin/python:
	@python=$$($(find_python)) && echo "using $$python" && "$$python" -m venv .venv
	.venv/bin/python -m pip install -q --upgrade pip

.venv/$(EXTRAS): .venv/bin/python pyproject.toml
	.venv/bin/python -m pip install -q -e '.[$(EXTRAS)]'
	touch $@

.venv/test: .venv/bin/python pyproject.toml
	.venv/bin/python -m pip install -q -e '.[test]'
	touch .venv/train $@

.venv/docs: .venv/bin/python pyproject.toml
	.venv/bin/python -m pip install -q -e '.[docs]'
	touch $@

# JAX's CUDA plugin without CUDA's own libraries: XLA compiles with it for a GPU that is not present. In .venv, JAX would
# look for a GPU at each start and print what is missing. 140 MB to download, 400 MB on disk.
.cuda/made: .venv/test
	rm -rf .cuda
	mkdir .cuda
	@if [ "$$(uname -s)" = Linux ] && ! .venv/bin/python -c 'import jax_plugins' 2>/dev/null; then \
	version=$$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))') && \
	.venv/bin/python -m pip install -q --no-deps --target .cuda \
	"jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"; fi
	touch $@

.oldest/made: $(tools) pyproject.toml
	rm -rf .oldest
	$(PYTHON) -m pip install -q --no-deps --target .oldest jax==$(oldest) jaxlib==$(oldest)
	touch $@

.recipes/%/made: $(tools) pyproject.toml
	rm -rf $(@D)
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q -e . $($*)
	$(if $(filter axlearn,$*),echo $(abspath $(AXLEARN)) > $$($(@D)/bin/python -c \
	'import sysconfig; print(sysconfig.get_path("purelib"))')/axlearn.pth)
	touch $@

clean:
	rm -rf .venv .cuda .oldest .recipes docs/_build runs
