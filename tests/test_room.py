"""room(): what a loop's iteration needs on the device, by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from common import auto_mesh, policy
from jax import lax
from jax.sharding import PartitionSpec

from jaxoffload import scan, tag
from jaxoffload._engine.jaxprs.flat import straight
from jaxoffload.proof import room
from jaxoffload.proof._predict.room import step_room

B, D, H, V, N = 64, 32, 256, 1024, 3
STREAM, WIDE, WEIGHT = 4 * B * D, 4 * B * H, 4 * D * H  # bytes of float32
SCALARS = 64  # counters and sums


def of(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def logits(x, table):
    """One chunk at a time."""
    add = lambda total, x: (total + jnp.sum(jnp.exp(x @ table.astype(jnp.bfloat16))), None)
    return lax.scan(add, jnp.zeros((), jnp.bfloat16), x)[0]


def test_a_chunk_of_logits_is_stored_and_what_is_fused_with_their_sum_is_not():
    found = room(logits, of(4, B, D, dtype=jnp.bfloat16), of(D, V))
    assert 0 <= found.loop - (2 * B * V + 2 * D * V) < SCALARS  # and the table, cast
    assert found.layer == 0


def test_a_sum_over_chunks_that_is_an_arguments_gradient_is_not_counted_twice():
    found = room(jax.grad(logits, 1), of(4, B, D, dtype=jnp.bfloat16), of(D, V)).loop
    assert 0 <= found - (2 * B * V + 2 * D * V) < SCALARS  # the cotangent of the logits, and what this chunk adds


def stack(x, w, **fields):
    def layer(x, w):
        return x + jnp.sin(tag(x @ w["in"], "fc1")) @ w["out"], None

    rules = policy({"fc1": "offload"}, resident_layers=0, **fields)
    return jnp.sum(scan(layer, x, w, policy=rules)[0])


def test_a_layer_has_its_residuals_those_of_the_next_and_what_it_computes():
    x, w = of(B, D), {"in": of(N, D, H), "out": of(N, H, D)}
    # fc1 of this layer and the next; its sin, the cotangent of that, and its own, which is computed beside the sin; the
    # stream's cotangent, before and after.
    most = 5 * WIDE + 2 * STREAM
    for microbatches in (1, 2):
        step = jax.grad(stack, 1)
        if microbatches > 1:
            add = lambda x, w: lambda total, _: (jax.tree.map(jnp.add, total, jax.grad(stack, 1)(x, w)), None)
            step = lambda x, w: lax.scan(add(x, w), w, None, length=2)[0]
        found = room(step, x, w)
        assert most <= found.layer <= most + 2 * WEIGHT + WIDE + SCALARS
        assert found.loop == 0
    # A residual that stays on the device is not counted twice.
    kept = room(jax.grad(lambda x, w: stack(x, w, offload_layers=0), 1), x, w)
    assert kept.layer <= found.layer


@pytest.mark.parametrize("together", [True, False])
def test_results_of_fused_ops_with_an_operand_in_common_are_there_at_once(together):
    """Though one of them is read before the other one can be computed. Not if that one needs what is read."""

    def f(x, w, u):
        def body(x, _):
            a = x @ w
            c = jnp.sin(a) @ w.T
            b = (x if together else c) @ u
            return x + c + (jnp.cos(a) * b) @ w.T, None

        return lax.scan(body, x, None, length=3)[0]

    found = room(f, of(B, D), of(D, H), of(D, H)).loop
    assert found // WIDE == (4 if together else 2)  # a, b and both results; or a and its sin, then a and b


@pytest.mark.parametrize("blocks", [4, 8])
def test_what_a_checkpoint_computes_again_is_in_no_kernel_with_the_first(blocks):
    block = jax.checkpoint(lambda x, w: x + jnp.sin(x) @ w)
    loss = lambda ws, x: jnp.sum(functools.reduce(block, ws, x) ** 2)
    side = 256
    jaxpr = jax.make_jaxpr(jax.grad(loss))([of(side, side)] * blocks, of(64 * side, side)).jaxpr
    _, most = step_room(jaxpr, {}, ())
    # Their inputs, and of one block what it computes again, two cotangents and what it adds to one.
    assert blocks < most.elsewhere / (64 * side * side * 4) < blocks + 4


def test_what_one_kernel_computes_elsewhere_stores_nothing_inside():
    S = 128

    def attend(q):
        with jax.named_scope("attention"):
            return jax.nn.softmax(q @ q.T) @ q

    def f(q):
        return lax.scan(lambda q, _: (attend(q) + 1, None), q, None, length=3)[0]

    def loss(q):
        return jnp.sum(lax.scan(jax.checkpoint(lambda q, _: (attend(q) + 1, None)), q, None, length=3)[0])

    for g in (f, jax.grad(loss)):
        scores = 4 * S * S
        assert room(g, of(S, 8)).loop >= scores
        assert room(g, of(S, 8), one_kernel=("attention",)).loop < scores
        assert room(g, of(S, 8), one_kernel=(name for name in ["attention"])).loop < scores  # it can be read only once


@pytest.mark.parametrize("wrong", ["attention", ["attention", ""], [b"attention"], None])
def test_names_of_scopes_are_not_a_string(wrong):
    """Each of its characters is in some scope's name, and nothing would be stored."""
    with pytest.raises(TypeError, match=r"^room: one_kernel must be names of scopes, such as \['attention'\], got"):
        room(jnp.sin, of(8), one_kernel=wrong)


@pytest.mark.parametrize("constrained, parts", [(True, 4), (False, 1)])
def test_values_are_divided_as_constraints_say(constrained, parts):
    mesh = jax.sharding.AbstractMesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def f(x, w):
        def add(total, w):
            wide = x @ w
            if constrained:
                wide = lax.with_sharding_constraint(wide, jax.P("a"))
            return total + jnp.sum(wide), None

        return lax.scan(add, jnp.float32(0), w)[0]

    with jax.sharding.use_abstract_mesh(mesh):
        assert 0 <= room(f, of(B, D), of(N, D, H)).loop - WIDE // parts < SCALARS


def test_rows_of_a_shard_map_on_their_way_to_the_host_count_once_per_device():
    """Two rows per token, as with experts, so that their number is no batch's."""
    mesh = jax.sharding.AbstractMesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    rules = policy({"fc1": "offload"}, resident_layers=0)

    @jax.shard_map(mesh=mesh, in_specs=(jax.P("a"), jax.P()), out_specs=jax.P("a"))
    def experts(x, w):
        fc1 = tag(jnp.repeat(x, 2, axis=0) @ w["in"], "fc1")
        return jnp.sum((jnp.sin(fc1) @ w["out"]).reshape(*x.shape, 2), axis=-1)

    def loss(w, x):
        return jnp.sum(scan(lambda x, w: (x + experts(x, w), None), x, w, policy=rules)[0])

    with jax.sharding.use_abstract_mesh(mesh):
        found = room(jax.grad(loss), {"in": of(N, D, H), "out": of(N, H, D)}, of(64 * B, D))
    rows = 2 * 64 * WIDE // 4
    assert 3 * rows <= found.layer < 3.5 * rows  # fc1 of this layer and of the next, its cotangent; the stream


def test_what_a_shard_map_made_says_nothing_of_other_values():
    """It is whole on each device in there, where an argument with as many rows is divided."""
    mesh = auto_mesh(a=4, b=2)
    rows, whole = PartitionSpec("a"), PartitionSpec()
    mean = jax.shard_map(lambda x: jax.lax.pmean(x, "a"), mesh=mesh, in_specs=rows, out_specs=whole)
    scaled = jax.shard_map(lambda x, m: x * jnp.sum(m), mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    jaxpr = jax.make_jaxpr(lambda x, y: scaled(y, mean(x)))(jnp.ones(32), jnp.ones(8))
    assert straight(jaxpr).rows == {32: 4, 8: 4}


def test_a_constraint_divides_what_a_shard_map_made_no_further_than_it_says():
    mesh = auto_mesh(a=4, b=2)

    def f(x):
        made = jax.shard_map(jnp.sin, mesh=mesh, in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a"))(x)
        return lax.with_sharding_constraint(made, jax.NamedSharding(mesh, PartitionSpec(("a", "b"))))

    program = straight(jax.make_jaxpr(f)(of(B, D)))
    assert program.share(program.outputs[0]) == STREAM // 8


def test_a_shard_map_over_some_axes_does_not_say_that_others_divide_nothing():
    mesh, whole = auto_mesh(a=4, b=2), PartitionSpec()

    def f(x):
        inside = jax.shard_map(jnp.sin, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"b"}, check_vma=False)
        return inside(x) + lax.with_sharding_constraint(2 * x, jax.NamedSharding(mesh, PartitionSpec("a")))

    program = straight(jax.make_jaxpr(f)(of(B, D)))
    assert program.share(program.inputs[0]) == STREAM // 4


def test_nothing_is_fused_across_an_optimization_barrier():
    """A sum over several products holds all of them, unless a barrier ends each addition."""

    def f(fence, x, w):
        def body(total, x):
            for _ in range(4):
                total, x = fence((total + x @ w, jnp.sin(x)))
            return total, x

        return lax.scan(lambda state, _: (body(*state), None), (x @ w, x), None, length=2)[0]

    found = [
        room(lambda x, w, fence=fence: f(fence, x, w), of(B, D), of(D, D)).loop
        for fence in (lambda x: x, lax.optimization_barrier)
    ]
    assert found[0] - found[1] >= 2 * STREAM
