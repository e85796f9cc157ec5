"""Counts of traced kernels, by hand. test_program.py has those that XLA compiles for a GPU."""

import math

import jax
import jax.numpy as jnp
import pytest
from common import assert_same_bits, auto_mesh, normal, policy, run
from jax import lax
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import PartitionSpec

from jaxoffload import accumulate, scan, tag
from jaxoffload._engine.jaxprs import readers
from jaxoffload._engine.jaxprs.readers import only_kernels_read
from jaxoffload._engine.layers import passes
from jaxoffload._engine.stages.repeated import repeated
from jaxoffload.proof._program.hlo import parse
from jaxoffload.proof._program.kernels import FLOPS, ran, traced

X, W = jnp.zeros((4, 8)), jnp.zeros((8, 8))
ONE = 2 * 4 * 8 * 8


def of(f, *args):
    return traced(jax.make_jaxpr(f)(*args).jaxpr)


def test_matmuls_run_in_each_iteration_and_count_in_all_branches():
    repeated = lambda x, w: lax.scan(lambda x, _: (jax.checkpoint(jnp.dot)(x, w), None), x, length=3)[0]
    assert of(repeated, X, W) == {"matmuls": 3, FLOPS: 3 * ONE}
    either = lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ w)
    assert of(either, X, W) == {"matmuls": 3, FLOPS: 3 * ONE}
    assert of(lambda x, w: x + 1, X, W) == {}


def test_a_loop_of_which_xla_does_not_know_how_often_it_runs_says_so_itself():
    thrice = lambda x, w: repeated(3, lambda i, x: x @ (i * w), x)
    assert of(thrice, X, W) == {"matmuls": 3, FLOPS: 3 * ONE}
    program = jax.jit(thrice).lower(X, W).compile().as_text()
    assert "known_trip_count" not in program
    assert ran(parse(program)) == {"matmuls": 3, FLOPS: 3 * ONE}
    assert thrice(jnp.ones((4, 8)), jnp.eye(8)).tolist() == jnp.zeros((4, 8)).tolist()


def test_what_only_runs_tell_is_not_known():
    until = lambda x, w: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x)
    assert of(until, X, W) is None
    assert of(lambda x: lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x + 1, x), X) == {}
    grouped = lambda x, w: lax.ragged_dot(x, w[None], jnp.array([4], jnp.int32)) @ w
    assert of(grouped, X, W) == pytest.approx({"matmuls": 2, FLOPS: math.nan}, nan_ok=True)


KERNEL = mosaic_gpu.kernel(lambda w, out: None, out_type=jax.ShapeDtypeStruct((8, 8), jnp.float32))
ONCE = jax.custom_vjp(KERNEL)
ONCE.defvjp(lambda w: (KERNEL(w), w), lambda w, y: (KERNEL(w) * y,))


def on_two(spec):
    """The kernel on two devices, which are asked for when it is called: a machine may have one GPU."""
    how = {"in_specs": spec, "out_specs": PartitionSpec("data"), "check_vma": False}
    return lambda w: jax.shard_map(KERNEL, mesh=auto_mesh(data=2), **how)(w)


@pytest.mark.parametrize(
    "f, rows, only_a_kernel",
    [
        (KERNEL, 8, True),
        (KERNEL, 4, False),  # XLA reads nothing in place that is not aligned
        (lambda w: jax.jit(lambda w: KERNEL(w) + KERNEL(tag(w, "w")))(w), 8, True),
        (on_two(PartitionSpec("data")), 16, True),
        (on_two(PartitionSpec("data")), 8, False),  # four on each device
        (on_two(PartitionSpec()), 8, False),  # the compiler may gather them for that
        (lambda w: (KERNEL(w), w), 8, False),
        (lambda w: KERNEL(w) + w, 8, False),
        (lambda w: KERNEL(2 * w), 8, False),
        (lambda w: KERNEL(lax.optimization_barrier(w)), 8, False),  # nothing is fused across it
        (lambda w: jax.vjp(jax.checkpoint(ONCE), w)[1](jnp.ones((8, 8))), 8, False),  # runs again, behind a barrier
        (lambda w: jax.vjp(jax.checkpoint(ONCE, prevent_cse=False), w)[1](jnp.ones((8, 8))), 8, True),
        (lambda w: jnp.tanh(w), 8, False),
        (lambda w: jnp.zeros(3), 8, False),
    ],
)
def test_what_only_a_kernel_reads_can_be_read_where_it_is(f, rows, only_a_kernel):
    jaxpr = jax.make_jaxpr(f)(jnp.zeros((rows, 8)))
    assert only_kernels_read(jaxpr) == [only_a_kernel]
    with jax.set_mesh(auto_mesh(data=2)):  # what is outside of a `shard_map`, the compiler divides
        assert only_kernels_read(jaxpr) == [only_a_kernel and rows == 16]


@pytest.mark.parametrize("microbatches", [(), (2,), (5,)])
@pytest.mark.parametrize(
    "how",
    [
        {"reverse": True},
        {"unroll": 2},
        {"offload_layers": 2},
        {"offload_layers": 3, "other_layers": "recompute"},
        {"resident_layers": 0},
    ],
    ids=str,
)
def test_rows_that_are_read_where_they_are_are_those_of_their_layers(monkeypatch, how, microbatches):
    """As if matmuls could read in place: here they only show which rows are taken."""
    of_scan = {key: how[key] for key in ("reverse", "unroll") if key in how}
    rules = policy({"h": "offload"}, **{key: value for key, value in how.items() if key not in of_scan})

    def gradient(w, x):
        layer = lambda x, w: (x + jnp.sin(tag(jnp.sin(x @ w[0]), "h")) @ w[1], None)  # traced again each time
        loss = lambda w, x: jnp.sum(scan(layer, x, w, policy=rules, **of_scan)[0] ** 2)
        return accumulate(loss)(w, x) if microbatches else jax.value_and_grad(loss)(w, x)

    args = tuple(normal(n, (5, 8, 8)) for n in range(2)), normal(2, (*microbatches, 4, 8))
    copied, found = run(lambda *args: gradient(*args), *args), list[list[bool]]()
    monkeypatch.setattr(readers, "READS_IN_PLACE", {"dot_general"})
    monkeypatch.setattr(passes, "only_kernels_read", lambda jaxpr: found.append(only_kernels_read(jaxpr)) or found[-1])
    assert_same_bits(run(lambda *args: gradient(*args), *args), copied)
    forward = [len(of) == 1 + len(args[0]) for of in found if any(of)]  # a backward pass takes residuals, too
    assert {*forward} == {True, False} and all(sum(of) == len(args[0]) for of in found)
