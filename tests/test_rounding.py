"""verify tells a wrong gradient from rounding: correct and faulty layers in the styles of other libraries."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import normal, on_cpu_and_gpu
from drawn_layers import draw
from faults import a_host_write_is_skipped, rows_in_wrong_order

from jaxoffload import Policy, scan, tag, verify
from jaxoffload._tracing import as_reference
from jaxoffload.proof._program.exact import compiled, exact_options
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._verify import gradients as _gradients
from jaxoffload.proof._verify.bits import differences, numbers
from jaxoffload.proof._verify.rounding import LIMIT, Rounding, furthest, rounding

pytestmark = pytest.mark.slow

# Layers; `make test-long` draws 300. Several are compiled together, because compilation takes nearly all of the time.
DRAWN = min(300, int(os.environ.get("EXAMPLES", 6)))
TOGETHER = 6
BATCHES = [range(first, min(first + TOGETHER, DRAWN)) for first in range(0, DRAWN, TOGETHER)]


@pytest.fixture(autouse=True)
def ranks_are_promoted():
    """As other people's layers expect."""
    with jax.numpy_rank_promotion("allow"):
        yield


def drawn(seeds):
    """Return one function with a list of losses, one per drawn layer, and its arguments."""
    layers = [draw(seed) for seed in seeds]

    def losses(args):
        return [loss(layer, *of_layer) for layer, of_layer in zip(layers, args, strict=True)]

    return losses, [(layer.x, *layer.xs) for layer in layers], layers


def loss(drawn, x, w, keys):
    policy = Policy(drawn.rules, min_offload_bytes=0)
    y, _ = scan(lambda x, w: (drawn.layer(x, w), None), x, (w, keys), policy=policy, strict=False)
    target = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)  # the norm of what is normalised is one
    return jnp.sum((y.astype(jnp.float32) - target) ** 2)


@pytest.mark.claim("other-peoples-layers")
@on_cpu_and_gpu
@pytest.mark.parametrize("seeds", BATCHES, ids=str)
def test_layers_in_other_peoples_styles_have_their_references_gradients(seeds, device):
    """LayerNorm, dropout, GELU, softmax by hand, einsums, convolutions, float32 islands."""
    losses, args, _ = drawn(seeds)
    target = target_of(lambda args: sum(losses(args)), (args,))
    program, run = target.exact_programs()
    results, reference, differ, _ = _gradients._compare(program, run, target.arrays)
    assert len(jax.tree.leaves(results)) > 2 * len(seeds)
    # A GPU still rounds a few differently, such as einsums over experts.
    assert not differ or (device == "gpu" and rounding(results, reference, run, target.arrays).share < LIMIT)


@pytest.fixture(scope="module")
def right():
    """A target of four layers, the program of its reference, and its results."""
    matters = lambda layer: len(layer.xs[1]) > 2 and layer.x.shape[1] > 1  # more than one row; a softmax of more than 1
    with jax.numpy_rank_promotion("allow"):
        losses, args, layers = drawn([seed for seed in range(20) if matters(draw(seed))][:4])
        target = target_of(lambda args: sum(losses(args)), (args,))
        run = compiled(as_reference(target.run), target.arrays, exact_options())
    return target, layers, run, numbers(run(*target.arrays))


@pytest.mark.claim("by-rounding")
@pytest.mark.parametrize("plant", [rows_in_wrong_order, a_host_write_is_skipped], ids=lambda plant: plant.__name__)
def test_a_planted_fault_exceeds_rounding_in_each_of_them(plant, right, monkeypatch):
    target, layers, run, reference = right
    plant(monkeypatch)
    wrong = lambda *args: target.run(*args)  # a new function, because JAX would not trace the same one again
    mine = numbers(compiled(wrong, target.arrays, exact_options())(*target.arrays))
    for k, layer in enumerate(layers):
        of = lambda results, k=k: results["gradient"][0][k]
        share, _ = rounding(of(mine), of(reference), lambda *args, of=of: of(run(*args)), target.arrays)
        assert share > LIMIT, (k, layer.blocks, layer.rules)


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
    ours, reference = target_of(of_squares, drawn_squares(0)).exact_programs()
    assert not [seed for seed in range(64) if _gradients._compare(ours, reference, drawn_squares(seed)).differ]


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
    assert of_rows(lambda results: results).share == 0
    found = of_rows(changed("g", np.s_[:], lambda g: np.nextafter(g, np.float32(np.inf))))
    assert 0 < found.share < 2 and 1e-8 < found.error < 1e-5
    half = of_rows(changed("g", np.s_[:], lambda g: g), jnp.bfloat16)
    assert half.share == 0 and half.error > 1e-4  # eight bits of mantissa
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
    assert of_rows(change).share > LIMIT


@pytest.mark.claim("by-rounding")
@pytest.mark.parametrize("by, verdict", [(1e-7, "holds"), (1e-3, "fails")])
def test_where_equal_arithmetic_cannot_be_had_results_are_judged_by_rounding(by, verdict, monkeypatch):
    """For example where XLA splits a sum over devices in only one of the programs."""
    real = _gradients._compare

    def apart(program, reference, args):
        results = real(program, reference, args)
        ours = jax.tree.map(lambda x: x * np.asarray(1 + by, x.dtype), results.ours)
        return results._replace(ours=ours, differ=list(differences(ours, results.reference)))

    monkeypatch.setattr(_gradients, "_compare", apart)
    found, said = _gradients.gradients(target_of(of_squares, drawn_squares(0)))
    assert found == verdict and "times the reference's own rounding error" in said
    assert said.startswith(
        "3 results are the reference's, 3 of them not bit for bit: " if by == 1e-7 else "3 of 3 results"
    )


def test_a_reference_that_rounding_alone_changes_much_is_not_evidence(monkeypatch):
    """Such as a router whose choice depends on rounding."""
    monkeypatch.setattr(_gradients, "rounding", lambda *_: Rounding(share=1.0, error=0.2))
    one = {"value": np.ones(1)}
    compared = lambda program, reference, _: _gradients.Results(one, one, ["differs"], reference)
    monkeypatch.setattr(_gradients, "_compare", compared)
    found, said = _gradients.gradients(target_of(of_squares, drawn_squares(0)))
    assert found == "not checked" and "rounding alone moves the reference's by 0.2 of their norm" in said
