"""A program that offloads, compiled for a GPU without compiler_options(), is told so; here a CPU stands for a GPU."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from common import normal, policy

from jaxoffload import accumulate, compiler_options, scan, tag, verify
from jaxoffload._engine.host import slow_copies

X, W = normal(0, (4, 8)), normal(1, (3, 8, 8)) / 3
WORDS = "a program that offloads was compiled without the options that let its copies overlap; compile it with jax.jit"


OFFLOAD, SAVE = policy({"fc1": "offload"}), policy({"fc1": "save"})


def loss(w, x, rules=OFFLOAD):
    return jnp.sum(scan(lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None), x, w, policy=rules)[0])


def step(w, x):
    return w - jax.grad(loss)(w, x)


def told(run):
    """Return the lines that were told."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)  # such as those of jaxlib's reader of profiles
        run()
    others = [(str(w.message), w.filename) for w in found if WORDS not in str(w.message) or w.filename != __file__]
    assert others == []
    return [warning.lineno for warning in found]


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(slow_copies, "_PLATFORM", "cpu")


def fresh(f):
    """Return `f` as a function that JAX has not compiled."""
    return lambda *args: f(*args)


OTHER = {"xla_gpu_enable_latency_hiding_scheduler": True}
TOLD = {
    "jit": lambda: jax.jit(fresh(step))(W, X),
    "with options that are not a GPU's": lambda: jax.jit(fresh(step), compiler_options={"xla_dump_to": ""})(W, X),
    "compiled ahead of time": lambda: jax.jit(fresh(step)).lower(W, X).compile(),
    "a jitted function in another": lambda: jax.jit(lambda *args: 2 * jax.jit(fresh(step))(*args))(W, X),
    "accumulate": lambda: jax.jit(accumulate(loss))(W, jnp.stack([X, X])),
}
NOT_TOLD = {
    "with options": lambda: jax.jit(fresh(step), compiler_options=OTHER)(W, X),
    "compiled ahead of time, with options": lambda: jax.jit(fresh(step)).lower(W, X).compile(compiler_options=OTHER),
    "lowered only": lambda: jax.jit(fresh(step)).lower(W, X),
    "not differentiated": lambda: jax.jit(fresh(loss))(W, X),
    "nothing offloads": lambda: jax.jit(jax.grad(lambda w: loss(w, X, SAVE)))(W),
    "compiled already": lambda: COMPILED(W, X),
    "verify": lambda: verify(loss, W, X),
}
COMPILED = jax.jit(fresh(step)).lower(W, X).compile()


@pytest.mark.claim("told-of-options")
@pytest.mark.parametrize("run", TOLD.values(), ids=TOLD)
def test_a_program_without_the_options_is_told(run, on_a_gpu):
    assert len(told(run)) == 1 and told(lambda: jax.jit(lambda x: x + 1)(X)) == []


@pytest.mark.parametrize("run", NOT_TOLD.values(), ids=NOT_TOLD)
def test_others_are_not(run, on_a_gpu):
    assert told(run) == []


def test_nor_on_a_cpu():
    assert told(TOLD["jit"]) == []


def test_nor_with_the_flags_of_the_environment(on_a_gpu, monkeypatch):
    assert slow_copies._FLAG in compiler_options("gpu")
    monkeypatch.setenv("XLA_FLAGS", f"--{slow_copies._FLAG}=true")
    assert told(TOLD["jit"]) == []


@pytest.mark.gpu
def test_on_a_gpu():
    assert len(told(TOLD["jit"])) == 1
    assert told(lambda: jax.jit(fresh(step), compiler_options=compiler_options())(W, X)) == []
    assert told(NOT_TOLD["verify"]) == []
