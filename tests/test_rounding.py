"""verify tells a wrong gradient from rounding: correct and faulty layers in the styles of other libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import normal, on_cpu_and_gpu
from faults import a_host_write_is_skipped, rows_in_wrong_order
from jax import lax

from jaxoffload import Policy, scan, tag, verify
from jaxoffload._tracing import as_reference
from jaxoffload.proof._program.exact import compiled, exact_options
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._verify import gradients as _gradients
from jaxoffload.proof._verify.gradients import LIMIT, differences, furthest, numbers, rounding

pytestmark = pytest.mark.slow
BATCH, SEQ, DIM, WIDE, HEADS = 2, 8, 16, 24, 2


@pytest.fixture(autouse=True)
def ranks_are_promoted():
    """As other people's layers expect."""
    with jax.numpy_rank_promotion("allow"):
        yield


# ---- layers in the styles of other libraries: what real models contract, reduce, normalise and drop


def layer_norm(x, w):
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * w["scale"] + w["bias"]


def rms_norm(x, w):
    """As Llama computes it: in float32, whatever the layer's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * w["scale"].astype(jnp.float32)).astype(x.dtype)


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def mlp(x, w, key):
    fc1 = tag(layer_norm(x, w) @ w["in"], "fc1")
    return dropout(tag(jax.nn.gelu(fc1, approximate=False), "act") @ w["out"], key)


def attention(x, w, key):
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", rms_norm(x, w), w[name]) for name in "qkv")
    scores = jnp.einsum("bqnh,bknh->bnqk", tag(q, "q"), k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None], scores, -1e9)
    exps = jnp.exp(scores - lax.stop_gradient(jnp.max(scores, -1, keepdims=True)))
    seen = dropout(exps / jnp.sum(exps, -1, keepdims=True), key)
    return jnp.einsum("bqnh,nhd->bqd", tag(jnp.einsum("bnqk,bknh->bqnh", seen, tag(v, "v")), "context"), w["o"])


def convolution(x, w, key):
    """A causal convolution over the sequence, and a depthwise one, as in state-space models."""
    how = {"window_strides": (1,), "padding": [(2, 0)], "dimension_numbers": ("NHC", "HIO", "NHC")}
    h = jax.nn.silu(tag(lax.conv_general_dilated(x, w["kernel"], **how), "conv"))
    return lax.conv_general_dilated(h, w["depthwise"], **how, feature_group_count=DIM)


def experts(x, w, key):
    """Every expert computes every token; a softmax weights them. These are einsums with batch dimensions."""
    gates = tag(jax.nn.softmax(x @ w["router"], -1), "gates")
    up = tag(jnp.einsum("bsd,edf->besf", x, w["experts_in"]), "fc1")
    return jnp.einsum("bse,besf,efd->bsd", gates, jax.nn.silu(up), w["experts_out"])


NORM, HEAD = {"scale": (DIM,), "bias": (DIM,)}, (DIM, HEADS, DIM // HEADS)
STYLES = {
    mlp: NORM | {"in": (DIM, WIDE), "out": (WIDE, DIM)},
    attention: NORM | {"q": HEAD, "k": HEAD, "v": HEAD, "o": (HEADS, DIM // HEADS, DIM)},
    convolution: {"kernel": (3, DIM, DIM), "depthwise": (3, 1, DIM)},
    experts: {"router": (DIM, 3), "experts_in": (3, DIM, WIDE), "experts_out": (3, WIDE, DIM)},
}
DECIDED = {"fc1": "offload", "act": "save", "q": "save", "context": "offload", "conv": "offload", "gates": "recompute"}


def arguments(dtype):
    """Return the input, the weights of three layers and their keys, for each style."""
    draw = lambda name, shape: normal(len(name), (3, *shape), dtype) / shape[0] ** 0.5 + (name == "scale")
    weights = [{name: draw(name, shape) for name, shape in shapes.items()} for shapes in STYLES.values()]
    return [(normal(9, (BATCH, SEQ, DIM), dtype), w, jax.random.split(jax.random.key(1), 3)) for w in weights]


def losses(args):
    """Return a loss for each style; the arguments are those of `arguments`."""
    policy = Policy(DECIDED, min_offload_bytes=0)

    def loss(style, x, w, keys):
        y, _ = scan(lambda x, of: (x + style(x, *of), None), x, (w, keys), policy=policy, strict=False)
        target = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)  # the norm of what is normalised is 1
        return jnp.sum((y.astype(jnp.float32) - target) ** 2)

    return [loss(style, *of_style) for style, of_style in zip(STYLES, args, strict=True)]


@pytest.mark.claim("other-peoples-layers")
@on_cpu_and_gpu
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.long)])
def test_layers_in_other_peoples_styles_have_their_references_gradients(dtype, device):
    """LayerNorm, dropout, GELU, softmax by hand, einsums, convolutions, float32 islands."""
    target = target_of(lambda args: sum(losses(args)), (arguments(dtype),))
    program, run = (target.compiled(exact_options, reference) for reference in (False, True))
    results, reference, differ = _gradients.compare(program, run, target.arrays)
    assert len(jax.tree.leaves(results)) > 2 * len(STYLES)
    # A GPU still rounds a few differently, such as einsums over experts.
    assert not differ or (device == "gpu" and rounding(results, reference, run, target.arrays)[0] < LIMIT)


@pytest.mark.long
@pytest.mark.claim("by-rounding")
@pytest.mark.parametrize("plant", [a_host_write_is_skipped, rows_in_wrong_order], ids=lambda f: f.__name__)
def test_a_planted_fault_exceeds_rounding_in_each_of_them(plant, monkeypatch):
    target = target_of(lambda args: sum(losses(args)), (arguments(jnp.float32),))
    run = compiled(as_reference(target.run), target.arrays, exact_options())
    plant(monkeypatch)
    wrong = lambda *args: target.run(*args)  # a new function, because JAX would not trace the same one again
    mine, reference = (numbers(f(*target.arrays)) for f in (compiled(wrong, target.arrays, exact_options()), run))
    for k, style in enumerate(STYLES):
        of = lambda results, k=k: results["gradient"][0][k]
        share, _ = rounding(of(mine), of(reference), lambda *args, of=of: of(run(*args)), target.arrays)
        assert share > LIMIT, style


def squares(x, w):
    """x + tanh(tanh(x @ w) @ w.T), which XLA fuses differently in the two programs."""
    return x + jnp.tanh(jnp.tanh(tag(x @ w, "fc1")) @ w.T), None


def of_squares(x, w):
    return jnp.sum(scan(squares, x, w, policy=Policy({"fc1": "offload"}, min_offload_bytes=0))[0] ** 2)


def drawn_squares(seed):
    return tuple(normal(2 * seed + k, shape) for k, shape in enumerate([(8, 8), (4, 8, 8)]))


def test_programs_that_xla_fuses_otherwise_are_compared_under_options_that_forbid_it():
    """Whatever the arguments."""
    said = "holds        gradients: 3 results are the reference's, bit for bit"
    assert str(verify(of_squares, *drawn_squares(0))["gradients"]) == said
    target = target_of(of_squares, drawn_squares(0))
    ours, reference = (target.compiled(exact_options, of_reference) for of_reference in (False, True))
    assert not [seed for seed in range(64) if _gradients.compare(ours, reference, drawn_squares(seed))[2]]


X, W = (np.asarray(normal(seed, shape)) for seed, shape in ((1, (8, 8)), (2, (3, 8, 8))))


def rows(x, w):
    """A sum for each of three matrices, and an integer."""
    return {"g": jnp.einsum("sd,ldf->lsf", jnp.tanh(x), w), "n": jnp.argmax(w)}


def of_rows(change, dtype=np.float32):
    """Return `rounding` of results that are changed, against unchanged ones."""
    args = (jnp.asarray(X, dtype), jnp.asarray(W, dtype))
    right = numbers(jax.jit(rows)(*args))
    return rounding(change({k: v.copy() for k, v in right.items()}), right, jax.jit(rows), args)


def changed(result, at, by):
    def change(results):
        results[result][at] = by(results[result][at])
        return results

    return change


def test_what_rounding_changes_is_less_than_one_rounding_of_the_arguments():
    assert of_rows(lambda results: results)[0] == 0
    share, error = of_rows(changed("g", np.s_[:], lambda g: np.nextafter(g, np.float32(np.inf))))
    assert 0 < share < 2 and 1e-8 < error < 1e-5
    share, error = of_rows(changed("g", np.s_[:], lambda g: g), jnp.bfloat16)
    assert share == 0 and error > 1e-4  # eight bits of mantissa
    empty = {"g": np.ones((0, 4, 8), np.float32)}
    assert (
        rounding(empty, empty, lambda: jax.tree.map(jnp.asarray, empty), ()) == (0, 0) and furthest(empty, empty) == 0
    )


@pytest.mark.parametrize(
    "change",
    [
        changed("g", 1, lambda g: g * np.float32(1.001)),  # only one layer, by a thousandth
        changed("g", np.s_[:2], lambda g: g[::-1].copy()),
        changed("g", (0, 0, 0), lambda g: np.nan),
        changed("g", (0, 0, 0), lambda g: np.inf),
        changed("n", (), lambda n: n + 1),
    ],
    ids=["a thousandth", "two layers swapped", "NaN", "infinity", "an integer"],
)
def test_what_is_wrong_is_more(change):
    assert of_rows(change)[0] > LIMIT


@pytest.mark.claim("by-rounding")
@pytest.mark.parametrize("by, verdict", [(1e-7, "holds"), (1e-3, "fails")])
def test_where_equal_arithmetic_cannot_be_had_results_are_judged_by_rounding(by, verdict, monkeypatch):
    """For example where XLA splits a sum over devices in only one of the programs."""
    real = _gradients.compare

    def apart(program, reference, args):
        ours, reference, _ = real(program, reference, args)
        ours = jax.tree.map(lambda x: x * np.asarray(1 + by, x.dtype), ours)
        return ours, reference, list(differences(ours, reference))

    monkeypatch.setattr(_gradients, "compare", apart)
    found, said = _gradients.gradients(target_of(of_squares, drawn_squares(0)))
    assert found == verdict and "times the reference's own rounding error" in said
    assert said.startswith(
        "3 results are the reference's, 3 of them not bit for bit: " if by == 1e-7 else "3 of 3 results"
    )


def test_a_reference_that_rounding_alone_changes_much_is_not_evidence(monkeypatch):
    """Such as a router whose choice depends on rounding."""
    monkeypatch.setattr(_gradients, "rounding", lambda *_: (1.0, 0.2))
    one = {"value": np.ones(1)}
    compared = lambda program, reference, _: (one, one, ["differs"])
    monkeypatch.setattr(_gradients, "compare", compared)
    found, said = _gradients.gradients(target_of(of_squares, drawn_squares(0)))
    assert found == "not checked" and "rounding alone moves the reference's by 0.2 of their norm" in said
