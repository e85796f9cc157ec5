"""plan() and the collectives that the compiler adds to layers: FSDP's and data parallelism's, by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from common import ONE_RATE, ROOT
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxoffload.proof._plan.collectives import Weight, of_layer, relaid_bytes, weights_of
from jaxoffload.proof._predict.room import divisions

from jaxoffload import Policy, plan, scan, tag
from jaxoffload._tracing import Trial
from jaxoffload.proof import Link
from jaxoffload.proof._plan import stacks
from jaxoffload.proof._plan.oracle import Oracle, divided
from models.config import load
from models.sharding import abstract_mesh
from models.step import program

pytestmark = pytest.mark.claim("plan-collectives")

LINK = Link(4, (1, 2**40), (4.0, 4.0), (2.0, 2.0), (1.0, 1.0), beside=0.5)  # GB/s
LAYERS, B, D, H = 3, 16, 32, 128
MESH = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
SPECS = {"in": P(None, "fsdp", "tensor"), "out": P(None, "tensor", "fsdp"), "scale": P()}


def layer(x, w, constrain):
    x = constrain(tag(x, "layer_input"))
    fc1 = tag((x * w["scale"].astype(x.dtype)[None]) @ w["in"].astype(x.dtype), "fc1")
    return x + constrain(jnp.tanh(fc1) @ w["out"].astype(x.dtype)), None


def loss(w, x, constrain=lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P(("data", "fsdp"))))):
    y, _ = scan(functools.partial(layer, constrain=constrain), x, w, policy=Policy(), strict=False)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def arrays(**specs):
    of = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))
    shapes = {"in": (LAYERS, D, H), "out": (LAYERS, H, D), "scale": (LAYERS, D)}
    w = {name: of(shape, jnp.float32, (SPECS | specs)[name]) for name, shape in shapes.items()}
    return w, of((B, D), jnp.bfloat16, P(("data", "fsdp")))


TRIALS = []  # layers live as long as the trial that they were traced under


def scan_of(f, *args):
    """The last scan of a step, or of a loss and its gradient by the first argument."""
    TRIALS.append(Trial(Policy()))
    run = f if len(jax.tree.leaves(jax.eval_shape(f, *args))) > 1 else jax.grad(f)
    return stacks.stacks_of(jax.make_jaxpr(TRIALS[-1].traced(run))(*args), stacks.spread(args))[-1]


def test_weights_are_gathered_as_they_are_cast():
    args = arrays()
    found = scan_of(loss, *args)
    # bfloat16, half of it: `tensor` stays.
    matrix = Weight(bytes=2 * D * H / 2, parts=4, others=2, has_gradient=True, row=(D, H), relaid=0.0)
    scale = Weight(bytes=2 * D, parts=1, others=8, has_gradient=True, row=(D,), relaid=0.0)
    # Of the second matrix the last axis is gathered.
    relaid = 4 * D * H / 8
    assert list(weights_of(found, args)) == [matrix, matrix._replace(row=(H, D), relaid=relaid), scale]
    assert relaid_bytes([found, found], args, 16) == LAYERS * relaid
    assert relaid_bytes([found], args, 32) == 0  # inside of a shard_map
    forward, backward = of_layer(found, args, 16, LINK)
    gather, scatter = (3 / 4 * D * H / rate for rate in (4e9, 2e9))
    assert forward == pytest.approx(LINK.beside * 2 * gather)
    over_data = D * H / 4 / 2 * (1 / 2e9 + 1 / 4e9)
    of_scale = 7 / 8 * 2 * D * (1 / 2e9 + 1 / 4e9)
    assert backward == pytest.approx(LINK.beside * (2 * (gather + scatter + over_data) + of_scale))
    assert of_layer(found, args, 16, None) == of_layer(found, args, 32, LINK) == (0, 0)


def test_a_step_takes_as_much_longer():
    args, found = arrays(), scan_of(loss, *arrays())
    planned = lambda machine: plan(loss, *args, budget="1GiB", machine=machine, fixed=Policy(min_offload_bytes=0))
    without, linked = (planned(dataclasses.replace(ONE_RATE, link=link)) for link in (None, LINK))
    more = LAYERS * sum(of_layer(found, args, 16, LINK))
    assert linked.step_ms - without.step_ms == pytest.approx(1e3 * more, abs=1e-5)
    assert linked.policy == without.policy


def test_nothing_is_gathered_that_does_not_divide_the_batch():
    args = arrays(**{"in": P(None, None, "tensor"), "out": P(None, "tensor")})
    found = scan_of(loss, *args)
    assert [w.parts for w in weights_of(found, args)] == [1, 1, 1]
    # Where nothing says how the batch is divided, nothing is known.
    free = functools.partial(loss, constrain=lambda x: x)
    found = scan_of(free, *args)
    assert list(weights_of(found, args)) == []


def test_weights_with_as_many_rows_as_the_batch_do_not_say_how_it_is_divided():
    def with_constraints(x, w, constrain):
        rows = lax.with_sharding_constraint(w["in"], NamedSharding(MESH, P("tensor")))
        return layer(x, w | {"in": rows}, constrain)

    def square(w, x):
        constrain = lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P(("data", "fsdp"))))
        y, _ = scan(functools.partial(with_constraints, constrain=constrain), x, w, policy=Policy(), strict=False)
        return jnp.mean(y.astype(jnp.float32))

    w, _ = arrays()
    args = w, jax.ShapeDtypeStruct((D, D), jnp.bfloat16, sharding=NamedSharding(MESH, P(("data", "fsdp"))))
    assert [(weight.parts, weight.others) for weight in weights_of(scan_of(square, *args), args)][1:] == [
        (4, 2),
        (1, 8),
    ]


@pytest.mark.parametrize("first", ["weights", "state"])
def test_the_state_of_an_optimizer_may_be_divided_more_than_the_weights(first):
    """ZeRO-1, whichever of the two comes first among the arguments: nothing is gathered in a layer."""
    (state, x), (w, _) = arrays(), arrays(**{"in": P(None, None, "tensor"), "out": P(None, "tensor")})
    names = ("a", "b") if first == "weights" else ("b", "a")
    args = dict(zip(names, (w, state), strict=True)), x

    def step(all_, x):
        w, state = (all_[name] for name in names)
        return jax.tree.map(lambda s, g: s + g, state, jax.grad(loss)(w, x))

    assert [weight.parts for weight in weights_of(scan_of(step, *args), args)] == [1, 1, 1]
    assert divisions(args)[w["in"].shape] == (2, 1)


def test_frozen_weights_have_no_gradients_to_reduce():
    args = arrays()
    found = scan_of(lambda x, w: loss(w, x), *reversed(args))
    assert not any(weight.has_gradient for weight in weights_of(found, args))
    forward, backward = of_layer(found, args, 16, LINK)
    assert forward == backward > 0


def mean_over_tensor(x, w):
    return lax.pmean(jnp.tanh(tag(tag(x, "layer_input") @ w, "fc1")), "tensor"), None


def with_a_checkpoint(x, w):
    inside = jax.checkpoint(lambda x: lax.pmean(jnp.tanh(tag(x @ w, "fc1")), "tensor"))
    return inside(tag(x, "layer_input")), None


@pytest.mark.parametrize("layer", [mean_over_tensor, with_a_checkpoint])
@pytest.mark.parametrize("nested", [False, True])
def test_a_scan_inside_of_a_shard_map(layer, nested):
    """Its layers are differentiated there, and their collectives are over its axes, in the step and by themselves."""
    over = functools.partial(jax.shard_map, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
    inner = functools.partial(jax.shard_map, in_specs=(P(), P()), out_specs=P(), axis_names={"tensor"}, check_vma=False)

    def loss(w, x):
        run = lambda w, x: scan(layer, x, w, policy=Policy(), strict=False)[0]
        run = over(inner(run), mesh=MESH, axis_names={"data"}) if nested else over(run, mesh=MESH)
        return jnp.sum(run(w, x))

    of = lambda spec, *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(MESH, spec))
    args = of(P(), LAYERS, D, D), of(P("data"), B, D)
    machine = dataclasses.replace(ONE_RATE, hbm_gb_s=1e9, gemm_tflops=1e9, link=LINK)
    found = scan_of(loss, *args)
    seconds = stacks.layers_seconds(jax.make_jaxpr(TRIALS[-1].traced(jax.grad(loss)))(*args), machine, 16)
    mean = 1 / 2 * (B // 2 * D * 4) * (1 / 2e9 + 1 / 4e9)  # of half the rows, over two devices
    left = 4 if nested else 1  # `fsdp`, over which the compiler may divide them
    each = pytest.approx(2 * mean / left, rel=0.01)  # of both passes
    assert seconds / LAYERS == each
    names = stacks.names_of([found], Policy())
    oracle = Oracle([divided(found, Policy())], names, lambda _: Policy(), machine, {}, ())
    assert [cost.seconds for cost in oracle(frozenset())] == [each]
    assert plan(loss, *args, budget="1GiB", machine=machine).step_ms > 1e3 * seconds


@pytest.mark.parametrize("experts", [False, True])
def test_the_reference_models_are_read(experts):
    """Matrices are gathered over fsdp, except that experts stay where the expert axis puts them."""
    name = "tiny-moe" if experts else "tiny"
    config = load(ROOT / f"configs/{name}.yaml", ["mesh.fsdp=2", *(["mesh.expert=2"] if experts else [])])
    mesh = abstract_mesh(config.mesh)
    made = program(config, mesh)
    args = made.state, made.tokens
    found = scan_of(made.step, *args)
    found = list(weights_of(found, args))
    assert {w.parts for w in found} == ({1, 2, 4} if experts else {1, 2}), found
    assert all(w.has_gradient for w in found)
