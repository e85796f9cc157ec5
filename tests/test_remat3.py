"""`jax_remat3`, JAX's next `jax.checkpoint`: with it on, all that is ours does what it does with it off."""

import jax
import jax.numpy as jnp
import pytest
from autodiff import accumulated, gradient, in_a_loop, kept
from common import assert_same_bits, normal, policy, run, run_each, setting
from jax import lax

from jaxoffload import accumulate, chain, check, checkpoint, offload, residuals, scan, tag, verify
from jaxoffload._engine.host.need import need_of

RULES = policy({"fc1": "offload"}, resident_layers=0)
X, W = normal(0, (4, 8)), normal(1, (3, 8, 8)) / 3
FIRST_RIGHT = jax.__version_info__ >= (0, 12)
needs_names_with_arrays = pytest.mark.skipif(not FIRST_RIGHT, reason="jax 0.11 refuses: see the test of that")

pytestmark = pytest.mark.claim("remat3")


@pytest.fixture
def remat3():
    with setting("jax_remat3", True):
        yield


def layer(x, w):
    return x + jnp.tanh(tag(x @ w, "fc1")), None


KINDS = {
    "scan": lambda x, w: scan(layer, x, w, policy=RULES)[0],
    "checkpoint": lambda x, w: checkpoint(lambda x, w: layer(x, w)[0], policy=RULES)(x, w[0]),
    "chain": lambda x, w: chain([lambda x, w: layer(x, w)[0]] * 3, x, list(w), policy=RULES),
    "in their checkpoint": lambda x, w: jax.checkpoint(lambda x, w: jnp.cos(KINDS["scan"](x, w)))(x, w),
    "offload": offload(lambda x, w: lax.scan(jax.checkpoint(layer, policy=RULES), x, w)[0]),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_names_with_arrays if name == "offload" else ()) for name in KINDS]
)
def test_gradients_and_what_is_kept_are_those_without_it(name, remat3):
    f = KINDS[name]
    loss = lambda x, w: jnp.sum(f(x, w) ** 2)
    table = lambda: residuals(loss, X, W)
    need = lambda: need_of(jax.make_jaxpr(gradient(loss, (0, 1)))(X, W)).bytes()
    results = lambda: (run(gradient(f, (0, 1)), X, W), kept(f, X, W), str(table()), need())
    grads, held, text, host = results()
    assert host
    with setting("jax_remat3", False):
        grads_without, *others = results()
    assert_same_bits(grads, grads_without)
    assert [held, text, host] == others


def test_accumulate_check_and_verify(remat3):
    f = lambda x, w: scan(layer, x, w, policy=RULES)[0]
    plain = lambda x, w: lax.scan(in_a_loop(layer, "fc1"), x, w)[0]
    assert_same_bits(*run_each([accumulated(f), accumulated(plain, interleaved=False)], X, W))
    step = lambda w, xs: accumulate(lambda w, x: jnp.sum(f(x, w) ** 2))(w, xs)[1]
    check(step, W, jnp.stack([X, X]), policy=RULES)
    checks = {check.claim: check.verdict for check in verify(lambda x, w: jnp.sum(f(x, w) ** 2), X, W)}
    assert set(checks.values()) <= {"holds", "not checked"} and checks["gradients"] == checks["moves"] == "holds"


@needs_names_with_arrays
def test_jaxs_checkpoint_asks_a_policy(remat3):
    f = lambda x, w: jnp.sin(tag(x @ w, "fc1"))
    on_host = lambda rules: kept(jax.checkpoint(f, policy=policy(rules)), X, W[0])["host", "float32", (4, 8)]
    assert on_host({"fc1": "offload"}) == 1 and on_host({"fc1": "save"}) == 0


def test_a_policy_is_refused_where_jax_shows_it_no_arrays(remat3, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    theirs = jax.checkpoint(layer, policy=RULES)
    for f in (lambda x, w: lax.scan(theirs, x, w)[0], offload(lambda x, w: lax.scan(theirs, x, w)[0])):
        with pytest.raises(NotImplementedError, match=r"jax_remat3 is on.*jax.config.update"):
            jax.make_jaxpr(gradient(f))(X, W)
