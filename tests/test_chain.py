"""chain(): unlike layers, unrolled; its values and bytes, and the rules that it shares with scan."""

import jax
import jax.numpy as jnp
import pytest
from autodiff import count, gradient, gradient_jaxpr, in_a_loop, kept, kept_bytes, saving
from common import assert_close, assert_same_bits, normal, on_cpu_and_gpu, policy, run_each
from jax import lax

from jaxoffload import chain, residuals, scan, tag, verify

BATCH, DIM, WIDE = 2, 4, 6
X = normal(0, (BATCH, DIM))
SHAPES = [(DIM, WIDE), (DIM, DIM), (DIM, WIDE), (DIM, DIM)]
WS = [normal(i + 1, shape) * 0.5 for i, shape in enumerate(SHAPES)]


def wide(x, w):
    x = tag(x, "layer_input")
    return jnp.sin(tag(x @ w, "fc1")) @ w.T + x


def narrow(x, w):
    x = tag(x, "layer_input")
    return jnp.cos(tag(x @ w, "fc1"))


FS = [wide, narrow, wide, narrow]
FC1 = [BATCH * shape[1] * 4 for shape in SHAPES]  # bytes of each layer's fc1
INPUT = BATCH * DIM * 4
OFF = {"fc1": "offload", "layer_input": "save"}


def ours(rules=OFF, **fields):
    return lambda x, ws: chain(FS, x, ws, policy=policy(rules, **fields))


def reference(x, ws, saved=("fc1", "layer_input")):
    for f, w in zip(FS, ws, strict=True):
        x = jax.checkpoint(f, policy=saving(*saved))(x, w)
    return x


FIELDS = [
    {},
    {"resident_layers": 0},
    {"offload_layers": 2},
    {"offload_layers": 0.5, "other_layers": "recompute"},
    {"resident_layers": 9},
]


@pytest.mark.claim("other-ways")
@on_cpu_and_gpu
def test_gradients_equal_the_reference_whichever_layers_offload(device):
    want, *grads = run_each([gradient(f, (0, 1)) for f in (reference, *(ours(**each) for each in FIELDS))], X, WS)
    for got in grads:
        assert_same_bits(got, want)
    assert_same_bits(*run_each([ours(), reference], X, WS))


@pytest.mark.parametrize("fields, moved", list(zip(FIELDS, (3, 4, 2, 2, 0), strict=True)))
def test_bytes_are_those_of_the_layers_that_offload(fields, moved):
    device, host = kept_bytes(ours(**fields), X, WS)
    recomputed = sum(FC1[2:3]) if "other_layers" in fields else 0
    assert host == sum(FC1[:moved])
    assert device == 4 * INPUT + sum(FC1[moved:]) - recomputed


def test_kept_producers_run_once_and_ties_are_there():
    jaxpr = gradient_jaxpr(ours(), X, WS, argnums=(0, 1))
    assert count(jaxpr, "dot_general") == 3 * 6  # forward, and two for the cotangents
    # Three copies to the host wait for the end of their layer, three layers wait for the copies of the layer two
    # before, and three fetches wait for a cotangent. A barrier also separates each layer's backward pass from its
    # forward pass, and from the next layer's backward pass.
    assert count(jaxpr, "optimization_barrier") == 3 + 3 + 3 + 4 + 4


def test_the_table():
    table = residuals(ours(offload_layers=2), X, WS)
    found = {(r.names[0], r.shape, r.state, r.reason): (r.layers, r.bytes) for r in table if r.names}
    assert found["fc1", (BATCH, WIDE), "offloaded", "fc1"] == (1, FC1[0])
    assert found["fc1", (BATCH, DIM), "offloaded", "fc1"] == (1, FC1[1])
    assert found["fc1", (BATCH, WIDE), "saved", "other_layers"] == (1, FC1[2])
    assert found["fc1", (BATCH, DIM), "saved", "resident"] == (1, FC1[3])
    assert (table.device_bytes, table.host_bytes) == kept_bytes(ours(offload_layers=2), X, WS)


def test_the_host_pool_is_judged_on_each_layers_own_bytes(monkeypatch):
    """In unlike layers, three of the four fc1 fit to the byte, but three of the largest would not."""
    pool = sum(FC1[:3])
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(pool / 2**30))
    assert kept_bytes(ours(), X, WS)[1] == pool
    with pytest.raises(MemoryError, match=r"chain: 4 layer\(s\) would offload .* enough for 3; .*offload_layers: 3"):
        kept_bytes(ours(resident_layers=0), X, WS)
    with pytest.warns(UserWarning, match="enough for 3, which offload"):
        assert kept_bytes(ours(resident_layers=0, on_host_full="save"), X, WS)[1] == pool


def test_carries_of_any_structure_whose_shapes_change():
    def grow(carry, w):
        n, x, none = carry
        return n + 1, tag(jnp.sin(x @ w), "fc1"), none

    ws = [normal(1, (DIM, WIDE)), normal(2, (WIDE, DIM)), normal(3, (DIM, 3))]
    rules = {"fc1": "offload"}
    f = lambda x, ws: chain([grow] * 3, (0, x, None), ws, policy=policy(rules, resident_layers=0))

    def plain(x, ws):
        carry = (0, x, None)
        for w in ws:
            carry = jax.checkpoint(grow, policy=saving("fc1"))(carry, w)
        return carry

    assert jax.eval_shape(f, X, ws) == jax.eval_shape(plain, X, ws)
    assert_same_bits(*run_each([gradient(f, (0, 1)), gradient(plain, (0, 1))], X, ws))


SECOND = {
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over reverse": jax.hessian,
    "gradient of a gradient's norm": lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
}


@pytest.mark.parametrize("derivative", SECOND.values(), ids=SECOND.keys())
def test_second_derivatives(derivative):
    f = lambda layers: lambda x: jnp.sum(layers(x, WS) ** 2)
    got, want = (jax.jit(derivative(f(layers)))(X) for layers in (ours(), reference))
    assert_close(got, want)


def test_groups_of_unlike_layers_in_a_scan_follow_the_scans_policy():
    groups = [jnp.stack([w, w * 0.9, w * 0.8]) for w in WS[:2]]
    pair = lambda x, ws: (chain(FS[:2], x, ws, policy=policy()), None)
    f = lambda x, ws: scan(pair, x, ws, policy=policy(OFF, resident_layers=0))[0]
    inner = lambda x, ws: (FS[1](FS[0](x, ws[0]), ws[1]), None)
    plain = lambda x, ws: lax.scan(in_a_loop(inner, "fc1", "layer_input"), x, ws)[0]
    assert_same_bits(*run_each([gradient(f, (0, 1)), gradient(plain, (0, 1))], X, groups))
    assert kept(f, X, groups)[("host", "float32", (3, BATCH, WIDE))] == 1


def test_what_it_refuses():
    with pytest.raises(TypeError, match=r"chain: policy must be a jaxoffload\.Policy"):
        chain(FS, X, WS, policy="save")
    with pytest.raises(TypeError, match="chain: 4 layers have 3 params"):
        chain(FS, X, WS[:3], policy=policy())
    with pytest.raises(TypeError, match="chain: layer 1 returns"):
        chain([narrow, lambda x, w: (x, w)], X, WS[1:4:2], policy=policy())
    with pytest.raises(TypeError, match=r"jaxoffload\.chain has no forward-mode derivative"):
        jax.jvp(lambda x: ours()(x, WS), (X,), (X,))
    with pytest.raises(TypeError, match=r"jaxoffload\.chain has no forward-mode derivative"):
        jax.linearize(lambda x: ours()(x, WS), X)[1](X)
    assert chain([], X, [], policy=policy()) is X


# ---- other results of layers ----


def with_norms(f):
    def layer(x, w):
        y = f(x, w)
        return y, {"norm": jnp.sum(tag(x @ w, "act") ** 2), "rows": jnp.arange(3)}

    return layer


NORMS = [with_norms(wide), with_norms(narrow), with_norms(wide), with_norms(narrow)]
RULES = {"fc1": "offload", "act": "save", "layer_input": "save"}


def with_others(x, ws):
    return chain(NORMS, x, ws, policy=policy(RULES), has_aux=True)


def others_of_jax(x, ws):
    others = []
    for f, w in zip(NORMS, ws, strict=True):
        x, other = jax.checkpoint(f, policy=saving(*RULES))(x, w)
        others.append(other)
    return x, others


USES = {
    "all": lambda out: out,
    "the carry": lambda out: out[0],
    "those of all layers": lambda out: out[1],
    "those of one layer": lambda out: out[1][1]["norm"],
}


@pytest.mark.claim("chain-aux")
def test_other_results_of_layers_come_back_and_are_differentiated():
    each = lambda f: [gradient(lambda x, ws, use=use: use(f(x, ws)), (0, 1)) for use in USES.values()]
    results = run_each([f for g in (with_others, others_of_jax) for f in (*each(g), g)], X, WS)
    half = len(USES) + 1
    for got, want in zip(results[:half], results[half:], strict=True):
        assert_same_bits(got, want)
    assert jax.tree.structure(with_others(X, WS)) == jax.tree.structure(others_of_jax(X, WS))
    assert kept_bytes(lambda *args: with_others(*args)[0], X, WS)[1] == sum(FC1[:3])


def test_other_results_in_vmap_in_scan_without_jit_and_as_the_reference():
    xs = jnp.stack([X, X + 1])
    batched = lambda f: gradient(lambda xs, ws: jax.vmap(f, (0, None))(xs, ws), (0, 1))
    assert_same_bits(*run_each([batched(with_others), batched(others_of_jax)], xs, WS))
    in_scan = lambda f: gradient(lambda x, ws: lax.scan(lambda x, _: (f(x, ws)[0], f(x, ws)[1]), x, length=2), (0, 1))
    ours = lambda x, ws: scan(lambda x, _: with_others(x, ws), x, length=2, policy=policy(RULES))
    assert_close(*run_each([gradient(ours, (0, 1)), in_scan(others_of_jax)], X, WS))
    with jax.disable_jit():
        assert jax.tree.structure(with_others(X, WS)) == jax.tree.structure(others_of_jax(X, WS))
    assert verify(lambda x, ws: jnp.sum(with_others(x, ws)[0]), X, WS)["gradients"].verdict == "holds"
    assert chain([], X, [], policy=policy(), has_aux=True) == (X, [])


@pytest.mark.parametrize(
    "f, has_aux, words",
    [
        (wide, True, r"chain: has_aux: layer 0 must return \(carry, other results\), but it returns PyTreeDef\(\*\)"),
        (wide, 1, "chain: has_aux must be True or False, got 1"),
    ],
)
def test_wrong_has_aux(f, has_aux, words):
    with pytest.raises(TypeError, match=words):
        chain([f], X, WS[:1], policy=policy(), has_aux=has_aux)
