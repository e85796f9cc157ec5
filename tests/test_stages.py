"""accumulate(stages=): the gradients of one device, on pipeline stages; errors that say what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import one_by_one
from common import assert_close, assert_same_bits, auto_mesh, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from microbatches import DIM, RULES, language_model, layer, of_layers, ours, params_of, plain, tokens

from jaxoffload import HostPoolFull, Policy, accumulate, compiler_options, evaluate, scan, tag, verify
from jaxoffload._engine.stages import collectives as stage_collectives
from jaxoffload._engine.stages.chunk import Chunks
from jaxoffload._engine.stages.schedule import Tick
from jaxoffload._jax import HOST
from jaxoffload.proof import exact_options
from jaxoffload.proof._program import hlo
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._verify.conservation import conservation
from jaxoffload.proof._verify.gradients import gradients
from jaxoffload.proof._verify.placement import placement

LAYERS = 8
PARAMS = params_of(LAYERS)


def on_mesh(f, sizes, args, **how):
    """Run `f`, jitted, on a mesh of stages, data and fsdp, with the layers on their stages and the rest everywhere."""
    mesh = auto_mesh(**dict(zip(("stage", "data", "fsdp"), sizes, strict=True)))
    of_layers = lambda path: path[-1].key in ("w", "bias", "half") if path and hasattr(path[-1], "key") else False
    spec = lambda path: P("stage") if of_layers(path) else P()
    params = jax.tree_util.tree_map_with_path(lambda p, x: jax.device_put(x, NamedSharding(mesh, spec(p))), args[0])
    rows = NamedSharding(mesh, P(None, ("data", "fsdp")))
    batch = [jax.device_put(x, rows if x.ndim > 1 else NamedSharding(mesh, P())) for x in args[1:]]
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(f, **how)(params, *batch))


def on_two_stages():
    return jax.set_mesh(auto_mesh(stage=2))


def everything(stack, params, tokens, scale, numbers):
    """Operands that differ between microbatches: a constant with a gradient, keys for each layer, rows of xs with a
    gradient. A carry of several arrays, one of a weak type. Scans before: one that stages do not divide, and a longer
    one that is frozen. Weights that are cast outside of the layers; and what the end reads of the begin."""
    x = params["embedding"][tokens]
    x, _ = stack(layer, x, jax.tree.map(lambda w: w[:3], of_layers(params)), RULES)
    frozen = jax.tree.map(lambda w: lax.stop_gradient(jnp.concatenate([w, w])), of_layers(params))
    x += stack(layer, jnp.full(x.shape, 0.1), frozen, RULES)[0] * 0.1
    gate = jnp.tanh(x) * scale[:, None, None]
    rows = jnp.tanh(params["bias"]) * scale[0]
    keys = jax.random.split(jax.random.key(numbers[0]), LAYERS)
    half = params["half"].astype(jnp.bfloat16)

    def step(carry, xs):
        x, count, kept = carry
        w, key, half, row = xs
        y, size = layer(x, w)
        y *= 1 + 0.1 * jnp.broadcast_to(row, y.shape)
        y = y * gate + jax.random.normal(key, y.shape) * 0.1 + (y.astype(half.dtype) @ half).astype(y.dtype)
        return (y, count + 1, kept * 0.5 + jnp.sum(y, -1)), (size, count)

    init = (x, 0, jnp.zeros(tokens.shape))
    (y, count, kept), (sizes, counts) = stack(step, init, (of_layers(params), keys, half, rows), RULES)
    loss = jnp.mean((y + gate) ** 2) + jnp.mean(kept) + jnp.mean(sizes**2) * count
    return loss, {"counts": counts, "kept": kept[0]}


@pytest.mark.parametrize(
    "sizes, virtual_stages, microbatches",
    [
        pytest.param((2, 2, 2), 1, 3, id="two"),
        pytest.param((4, 1, 2), 1, 3, id="fewer microbatches than stages", marks=pytest.mark.slow),
        pytest.param((4, 1, 1), 2, 6, id="four with two each", marks=pytest.mark.long),
        pytest.param((2, 2, 1), 2, 19, id="a loop over ticks, two each", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("compiled_fast")
def test_gradients_equal_those_of_one_device(sizes, virtual_stages, microbatches):
    args = params_of(max(LAYERS, 2 * sizes[0] * virtual_stages)), tokens(microbatches, rows=4)
    of = lambda stack: functools.partial(language_model, stack)
    expected = jax.jit(one_by_one(of(plain), has_aux=True))(*args)
    staged = accumulate(of(ours), has_aux=True, stages="stage", virtual_stages=virtual_stages)
    assert_close(on_mesh(staged, sizes, args), jax.device_get(expected))


HALF = {
    "cast": lambda w, dtype: w.astype(dtype),
    "transposed": lambda w, dtype: jax.jit(lambda w: jnp.swapaxes(w, 1, 2).astype(dtype))(w),
    "in_two_steps": lambda w, dtype: w.astype(jnp.float32).astype(dtype),
    "rounded": lambda w, dtype: w.astype(dtype).astype(jnp.float32),
    "scaled": lambda w, dtype: w.astype(dtype) * jnp.asarray(1.3, dtype),
    "shared": lambda w, dtype: w[0].astype(dtype),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, loss_scale, virtual_stages, microbatches",
    [(jnp.float16, 2.0**13, 1, 16), pytest.param(jnp.bfloat16, 1.0, 2, 4, marks=pytest.mark.long)],
)
def test_weights_that_the_loss_casts(dtype, loss_scale, virtual_stages, microbatches):
    """Gradients are sums in the parameters' dtype: those of a loss with a scale are beyond float16's range."""

    def loss(stack, params, x):
        w = {name: f(params[name], dtype) for name, f in HALF.items()}
        shared = w.pop("shared")

        def step(x, w):
            for name, each in w.items():
                x = x + tag(jnp.tanh(x @ each.astype(x.dtype)), name) * 0.3
            return x + jnp.tanh(x @ shared) * 0.3, None

        y, _ = stack(step, x.astype(dtype), w, dict.fromkeys(w, "offload"))
        return loss_scale * jnp.mean(y.astype(jnp.float32) ** 2)

    params = {name: normal(n, (LAYERS, DIM, DIM)) / 3 for n, name in enumerate(HALF)}
    params["in_two_steps"] = params["in_two_steps"].astype(jnp.bfloat16)
    args = params, normal(9, (microbatches, 4, DIM))
    one = jax.jit(jax.grad(functools.partial(loss, plain)), compiler_options=exact_options())
    of_each = [jax.device_get(one(params, x)) for x in args[1]]
    expected = jax.tree.map(lambda *cts: functools.reduce(np.add, cts), *of_each)
    staged = accumulate(functools.partial(loss, ours), reduction="sum", stages="stage", virtual_stages=virtual_stages)
    with on_two_stages():
        found = jax.device_get(jax.jit(staged, compiler_options=exact_options())(*args)[1])
    assert dtype != jnp.float16 or max(np.max(np.abs(x)) for x in expected.values()) > jnp.finfo(dtype).max
    # The sum over layers is one on each stage: it is rounded otherwise, in each microbatch.
    rounding = jnp.finfo(dtype).eps * sum(np.max(np.abs(cts["shared"])) for cts in of_each)
    np.testing.assert_allclose(found.pop("shared"), expected.pop("shared"), rtol=0, atol=rounding)
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.slow
@pytest.mark.claim("sums-in-a-wider-dtype")
@pytest.mark.parametrize("microbatches, virtual_stages", [(4, 2), pytest.param(13, 1, marks=pytest.mark.long)])
def test_sums_in_a_wider_dtype(microbatches, virtual_stages):
    """Of weights that are moved to the layers, cast to more than that before them, or behind them; and of a parameter
    that nothing reads."""

    def loss(stack, params, x):
        def step(x, w):
            for name, each in w.items():
                x = x + tag(jnp.tanh(x.astype(each.dtype) @ each), name).astype(x.dtype)
            return x, None

        w = {"same": params["same"], "wider": params["wider"].astype(jnp.float32), "float32": params["float32"]}
        y, _ = stack(step, x, w, dict.fromkeys(w, "offload"))
        return jnp.mean((y @ params["out"]).astype(jnp.float32) ** 2)

    params = {name: normal(n, (LAYERS, DIM, DIM)) / 3 for n, name in enumerate(("same", "wider", "float32"))}
    params |= {"out": normal(4, (DIM, DIM)), "unused": normal(5, (DIM,))}
    params = {name: x if name == "float32" else x.astype(jnp.bfloat16) for name, x in params.items()}
    args = params, normal(9, (microbatches, 4, DIM), jnp.bfloat16)
    how = {"compiler_options": exact_options()}
    summed = {"reduction": "sum", "sum_dtype": jnp.float32}
    _, expected = jax.device_get(jax.jit(one_by_one(functools.partial(loss, plain), **summed), **how)(*args))
    staged = accumulate(functools.partial(loss, ours), stages="stage", virtual_stages=virtual_stages, **summed)
    with on_two_stages():
        found = jax.device_get(jax.jit(staged, **how)(*args)[1])
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(expected))


@pytest.mark.parametrize("run", [pytest.param(accumulate, marks=pytest.mark.slow), evaluate])
def test_negative_zeros_leave_the_stages(run):
    def layer(x, w):
        zeros = -jnp.zeros(3) * jnp.abs(x[0, 0])
        return x + jnp.tanh(tag(x @ w, "fc1")), (zeros, zeros.astype(jnp.bfloat16), lax.complex(zeros, zeros))

    def loss(w, x):
        y, (single, half, both) = scan(layer, x, w, policy=Policy({"fc1": "offload"}, min_offload_bytes=0))
        return jnp.mean(y), [1 / single, 1 / half, 1 / both.real, 1 / both.imag]

    staged = run(loss, has_aux=True, stages="stage")
    with on_two_stages():
        found = jax.jit(staged)(PARAMS["w"], normal(6, (3, 4, DIM)))
    _, aux = found if run is evaluate else found[0]
    assert all(np.all(x == -np.inf) for x in aux), aux


@pytest.mark.usefixtures("compiled_fast")
def test_passes_that_nobody_reads_find_numbers_of_any_kind_and_offsets_in_range(monkeypatch):
    """They run with memory that nothing was written to. A GPU copies from any offset."""
    found = set()
    noted = lambda at: found.add(int(at)) or at

    @jax.custom_vjp
    def element(x, at):
        return x[at]

    def backward(at, ct):
        at = jax.pure_callback(noted, jax.ShapeDtypeStruct((), jnp.int32), at)
        return jnp.zeros(DIM).at[at].set(ct), np.zeros((), jax.dtypes.float0)

    element.defvjp(lambda x, at: (x[at], tag(at, "at")), backward)

    def step(x, w):
        fc1 = tag(x * w, "fc1")
        return jnp.tanh(fc1) * element(x, jnp.argmax(x).astype(jnp.int32)), None

    loss = lambda stack, w, x: jnp.sum(stack(step, x, w, {"fc1": "offload"})[0])
    args = 1 + normal(0, (4, DIM)), 1 + normal(1, (3, DIM))
    expected = jax.device_get(jax.jit(one_by_one(functools.partial(loss, plain)))(*args))
    anything = lambda shape, dtype, **_: jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 99, dtype)
    monkeypatch.setattr(lax, "empty", anything)
    with on_two_stages():
        got = jax.device_get(jax.jit(accumulate(functools.partial(loss, ours), stages="stage"))(*args))
    assert_close(got, expected)
    assert found and found <= set(range(DIM))


@pytest.mark.slow
@pytest.mark.parametrize(
    "virtual_stages, microbatches, options", [(1, 11, exact_options()), pytest.param(2, 3, {}, marks=pytest.mark.long)]
)
def test_what_stages_alone_compute_has_the_same_bits(virtual_stages, microbatches, options):
    """Nothing else is divided: the layers' gradients are sums of the same numbers in the same order. With eleven
    microbatches there is a loop over ticks, which XLA:CPU rounds in its own way unless it is told not to."""
    args, how = (PARAMS, tokens(microbatches, rows=4)), {"compiler_options": options}
    of = lambda stack: functools.partial(language_model, stack)
    (loss, aux), grads = jax.jit(one_by_one(of(plain), has_aux=True), **how)(*args)
    staged = accumulate(of(ours), has_aux=True, stages="stage", virtual_stages=virtual_stages)
    (staged_loss, staged_aux), staged_grads = on_mesh(staged, (2, 1, 1), args, **how)
    alone = lambda aux, grads: jax.tree.leaves([aux, of_layers(grads)])
    assert_same_bits(alone(staged_aux, staged_grads), jax.device_get(alone(aux, grads)))
    assert_close([staged_loss, staged_grads], jax.device_get([loss, grads]))


@pytest.mark.gpu
@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("virtual_stages, microbatches", [(1, 5), (2, 14)])
def test_two_gpus_compute_the_bits_of_one(virtual_stages, microbatches):
    """Copies to the host and back are real there. Without a loop over ticks, and with one."""
    weights = 0.03 * normal(0, (8 * virtual_stages, 1024, 1024), jnp.bfloat16)
    params = {"w": weights, "out": 0.03 * normal(1, (1024, 1024), jnp.bfloat16)}
    batch = normal(2, (microbatches, 2048, 1024), jnp.bfloat16)
    step = lambda x, w: (tag(x, "x") + jax.nn.silu(tag(x @ w, "fc1")), None)
    policy = Policy({"x": "offload", "fc1": "offload"}, min_offload_bytes=0)

    def loss(params, x):
        y, _ = scan(step, x, params["w"], policy=policy)
        return jnp.mean((y @ params["out"]).astype(jnp.float32) ** 2)

    how = {"compiler_options": compiler_options()}
    _, expected = jax.jit(one_by_one(loss, reduction="sum"), **how)(params, batch)
    staged = accumulate(loss, stages="stage", virtual_stages=virtual_stages, reduction="sum")
    _, found = on_mesh(staged, (2, 1, 1), (params, batch), **how)
    assert_same_bits(jax.tree.leaves(found), jax.device_get(jax.tree.leaves(expected)))


@pytest.mark.parametrize("sizes, virtual_stages, microbatches", [((2, 2, 2), 2, 3), ((4, 1, 1), 1, 6)])
@pytest.mark.usefixtures("compiled_fast")
def test_losses_by_forward_passes_alone_equal_those_of_one_device(sizes, virtual_stages, microbatches):
    args = PARAMS, tokens(microbatches, rows=4)
    of = lambda stack: functools.partial(language_model, stack)
    expected = jax.jit(evaluate(of(plain), has_aux=True))(*args)
    how = {"stages": "stage", "virtual_stages": virtual_stages}
    assert_close(on_mesh(evaluate(of(ours), has_aux=True, **how), sizes, args), jax.device_get(expected))


@pytest.mark.claim("stages")
def test_evaluation_moves_no_layers():
    """Neither whole, as XLA's partitioning of a plain scan does, nor one at a time."""
    _, args, on_stages = staged(groups=2)
    how = {"stages": "stage", "virtual_stages": 2}
    with on_stages:
        program = jax.jit(evaluate(in_groups, has_aux=True, **how)).lower(*args).compile()
    found = hlo.collectives(hlo.parse(program.as_text()))
    # Activations, and the ys; on a CPU those of the last stage are summed as bits.
    assert set(found) == {
        *(("collective-permute", shape) for shape in ("f32[4,5,8]", "f32[8]")),
        *(("all-reduce", shape) for shape in ("u32[4,5,8]", "u32[8]")),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_fast")
def test_all_that_a_loss_can_have():
    params = PARAMS | {"half": normal(5, (LAYERS, DIM, DIM)) / 5}
    args = params, tokens(3, rows=4), normal(6, (3, 4)), jnp.arange(6).reshape(3, 2)
    of = lambda stack: functools.partial(everything, stack)
    expected = jax.jit(one_by_one(of(plain), has_aux=True, reduction="sum"))(*args)
    how = {"has_aux": True, "reduction": "sum", "stages": "stage", "virtual_stages": 2}
    loss = of(functools.partial(ours, strict=False))
    got, expected = on_mesh(accumulate(loss, **how), (2, 1, 1), args), jax.device_get(expected)
    assert_close(on_mesh(evaluate(loss, **how), (2, 1, 1), args), expected[0])
    # The layers round to bfloat16 before they multiply, and XLA may fuse that on one side alone.
    (got_value, got_grads), (value, grads) = got, expected
    half, rounding = grads.pop("half"), float(jnp.finfo(jnp.bfloat16).eps)
    np.testing.assert_allclose(got_grads.pop("half"), half, rtol=0, atol=rounding * np.max(np.abs(half)))
    assert_close([got_value, got_grads], [value, grads])


def grouped(stack, params, x):
    """Layers in groups, reshaped inside a jitted function. The loss reads one of their stacks, too, and a matrix that
    all layers share, transposed by a reshape."""

    @jax.jit
    def through(w, x):
        mixed = lambda x, w: (layer(x, w)[0] @ params["mixer"], None)
        return stack(mixed, x, jax.tree.map(lambda w: w.reshape(LAYERS, *w.shape[2:]), w), RULES)[0]

    y = through(of_layers(params), x) @ lax.reshape(params["mixer"], (DIM, DIM), dimensions=(1, 0))
    return jnp.mean(y**2) + jnp.mean(params["w"] ** 2)


@pytest.mark.parametrize("stages", [None, pytest.param("stage", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("compiled_fast")
def test_layers_that_are_stored_in_groups(stages):
    in_groups = lambda w: w.reshape(2, LAYERS // 2, *w.shape[1:])
    params = {name: in_groups(x) if name in ("w", "bias") else x for name, x in PARAMS.items()}
    args = params, normal(6, (3, 4, DIM))
    of = lambda stack: functools.partial(grouped, stack)
    expected = jax.jit(one_by_one(of(plain)))(*args)
    how = {"stages": "stage", "virtual_stages": 2} if stages else {}
    with on_two_stages():
        got = jax.jit(accumulate(of(ours), **how))(*args)
    assert_close(jax.device_get(got), jax.device_get(expected))


def stack_of(layers, **how):
    """A loss on a scan of so many layers."""
    rules = {"fc1": "offload"}

    def loss(params, x):
        w = jax.tree.map(lambda w: jnp.resize(w, (layers, *w.shape[1:])), of_layers(params))
        return jnp.mean(ours(layer, x, w, rules, strict=False, **how)[0])

    return loss


def mapped(params, x):
    row = lambda x: ours(layer, x, of_layers(params), {"fc1": "offload"})[0]
    return jnp.mean(jax.vmap(row)(x[:, None]))


def printing(params, x):
    jax.debug.print("{}", jnp.sum(x))
    return stack_of(LAYERS)(params, x)


X = jnp.ones((4, 4, DIM))
REFUSED = {
    "no axis": (
        stack_of(8),
        {"stages": "stag"},
        ValueError,
        r"stages='stag' is not an axis of the mesh, .*stage, data",
    ),
    "does not divide": (stack_of(7), {}, ValueError, "has scans of 7 layers, .* divisible by 2 stages \\* 1 virtual"),
    "no scan": (lambda params, x: jnp.sum(params["w"]) * jnp.sum(x), {}, ValueError, "has no scan of jaxoffload's"),
    "one layer": (stack_of(4), {"virtual_stages": 2}, ValueError, "4 layers in 4 chunks.* fewer virtual stages"),
    "reverse": (stack_of(8, reverse=True), {}, NotImplementedError, "reverse=True cannot be dealt"),
    "vmap": (mapped, {}, NotImplementedError, "a scan inside vmap or checkify, or one that offload"),
    "effects": (printing, {}, NotImplementedError, "the loss has effects .*Debug"),
}


@pytest.mark.parametrize("loss, how, error, words", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_staged_is_refused_before_anything_is_compiled(loss, how, error, words):
    with pytest.raises(error, match=f"^accumulate: .*{words}"):
        on_mesh(accumulate(loss, **{"stages": "stage", **how}), (2, 1, 1), (PARAMS, X))


def test_an_evaluation_says_that_it_is_one_and_has_no_derivative():
    on_stages = evaluate(stack_of(8), stages="stage")
    with pytest.raises(ValueError, match=r"^evaluate: the loss has scans of 7 layers, .* layers of one must"):
        on_mesh(evaluate(stack_of(7), stages="stage"), (2, 1, 1), (PARAMS, X))
    assert_close(on_mesh(on_stages, (2, 1, 1), (PARAMS, X)), evaluate(stack_of(8))(PARAMS, X))
    frozen = lambda params, x: stack_of(8)(jax.tree.map(lax.stop_gradient, params), x)
    assert_close(on_mesh(evaluate(frozen, stages="stage"), (2, 1, 1), (PARAMS, X)), evaluate(frozen)(PARAMS, X))
    for derivative in (jax.grad(on_stages), jax.grad(on_stages, 1), lambda *args: jax.jvp(on_stages, args, args)):
        with pytest.raises(NotImplementedError, match=r"^evaluate: on pipeline stages it cannot be differentiated"):
            on_mesh(derivative, (2, 1, 1), (PARAMS, X))


def in_parts(f, into=("data",), **how):
    """`f` in a shard_map over the axis data. It is made where it is called: JAX keeps the mesh of the first call."""
    how = {"in_specs": P("data"), "out_specs": P(*into), "axis_names": {"data"}, "check_vma": False, **how}
    return lambda h: jax.shard_map(f, **how)(h)


def divided(x, *spec):
    return lax.with_sharding_constraint(x, P(*spec))


def layers_with(communicate, tail=lambda y: y):
    """A loss whose layers, and what is behind them, pass rows that `data` divides between devices."""

    def step(x, w):
        x = divided(tag(x, "x"), "data")
        return x + divided(communicate(jnp.tanh(tag(x @ w, "fc1"))), "data"), None

    policy = Policy({"x": "offload", "fc1": "offload"}, min_offload_bytes=0)
    return lambda w, x: jnp.mean(tail(divided(scan(step, x, w, policy=policy)[0], "data")) ** 2)


def on_stages_and_data(loss, microbatches=1, run=accumulate):
    """The function of `accumulate` on two stages of four devices, with its arguments; a context."""
    mesh = auto_mesh(stage=2, data=2, tensor=2)
    w = jax.device_put(normal(0, (4, DIM, DIM)) / 5, NamedSharding(mesh, P("stage")))
    x = jax.device_put(normal(1, (microbatches, 8, DIM)), NamedSharding(mesh, P(None, "data")))
    return jax.jit(run(loss, stages="stage")), (w, x), jax.set_mesh(mesh)


def in_groups_of_devices(h):
    """All collectives that XLA:CPU has, but for one."""
    exchange = lambda h, *axes: lax.all_to_all(h, "data", *axes, tiled=True)
    h = in_parts(lambda h: exchange(jnp.sin(exchange(h, 1, 0)), 0, 1))(h)
    h = in_parts(lambda h: lax.psum_scatter(lax.all_gather(h, "data", tiled=True), "data", tiled=True))(h)
    return in_parts(lambda h: h + lax.pmean(h, "data"))(h)


def ring(h):
    return in_parts(lambda h: lax.ppermute(h, "data", [(0, 1), (1, 0)]))(h)


def behind(y):
    """A branch is allowed in what all devices run together."""
    return lax.cond(jnp.sum(y) < 1e9, lambda y: jnp.roll(y, 1, 0) * ring(y), lambda y: y, y)


@pytest.mark.claim("stages")
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize(
    "communicate, run",
    [
        pytest.param(in_groups_of_devices, accumulate, id="gradients", marks=pytest.mark.slow),
        pytest.param(lambda h: ring(jnp.roll(in_groups_of_devices(h), 1, 0)), evaluate, id="forward"),
    ],
)
def test_layers_that_communicate_within_a_stage(communicate, run):
    loss = layers_with(communicate, behind)
    step, args, on_mesh = on_stages_and_data(loss, microbatches=2, run=run)
    with on_mesh:
        got, expected = step(*args), jax.jit(run(loss))(*args)
    assert_close(jax.device_get(got), jax.device_get(expected))


@jax.custom_vjp
def ring_backward(h):
    return h * 2


ring_backward.defvjp(lambda h: (h * 2, None), lambda _, ct: (ring(ct),))
REFUSED_AS_TRACED = {
    "ring": (ring, accumulate, r"a layer calls ppermute over 'data' \(.*test_stages\.py:\d+.*XLA has all devices meet"),
    "ring, backward alone": (ring_backward, accumulate, "a layer calls ppermute over 'data'"),
    **{
        f"over the stages, {run.__name__}": (
            in_parts(lambda h: lax.psum(h, "stage"), in_specs=P(), out_specs=P(), axis_names={"stage"}),
            run,
            "a layer calls psum over 'stage' .* different layers, for different microbatches; .* not over 'stage'",
        )
        for run in (accumulate, evaluate)
    },
    "with a mesh": (
        lambda h: in_parts(jnp.sin, mesh=auto_mesh(stage=2, data=2, tensor=2))(h),
        accumulate,
        "cannot be traced.* in the layer, without mesh",
    ),
    "divided over the stages": (lambda h: divided(h, "stage"), accumulate, "leave 'stage' out of their shardings"),
}


@pytest.mark.claim("stages")
@pytest.mark.parametrize("communicate, run, words", REFUSED_AS_TRACED.values(), ids=REFUSED_AS_TRACED)
def test_layers_that_would_wait_for_other_stages_are_refused_as_they_are_traced(communicate, run, words):
    step, args, on_mesh = on_stages_and_data(layers_with(communicate), run=run)
    with on_mesh, pytest.raises(NotImplementedError, match=f"^accumulate: stages='stage': .*{words}"):
        step.lower(*args)


def test_a_result_that_is_constrained_to_a_mesh_of_the_users_is_refused():
    mesh = auto_mesh(stage=2, data=2)

    def by(how):
        step = lambda x, w: (lax.with_sharding_constraint(x + jnp.tanh(tag(x @ w, "fc1")), how), None)
        return lambda w, x: jnp.sum(ours(step, x, w, {"fc1": "offload"})[0])

    args = PARAMS["w"], normal(6, (3, 4, DIM))
    with jax.set_mesh(mesh):
        jax.make_jaxpr(accumulate(by(P("data")), stages="stage"))(*args)
        with pytest.raises(NotImplementedError, match="constrained by a NamedSharding; use a PartitionSpec"):
            jax.make_jaxpr(accumulate(by(NamedSharding(mesh, P("data"))), stages="stage"))(*args)


REFUSED_AS_COMPILED = {
    "roll": (lambda h: jnp.roll(h, 1, 0), r"for jit\(_roll_static\)/"),
    "over another axis": (lambda h: jnp.sin(divided(h, "tensor")), "for sharding_constraint"),
}


@pytest.mark.claim("stages")
@pytest.mark.usefixtures("compiled_fast")
@pytest.mark.parametrize(
    "communicate, words",
    [
        pytest.param(*it, id=name, marks=[pytest.mark.slow] * (name != "roll"))
        for name, it in REFUSED_AS_COMPILED.items()
    ],
)
def test_layers_that_would_wait_for_other_stages_are_refused_as_they_are_compiled(communicate, words):
    """Nothing runs: it would hang, and XLA would end the process."""
    step, args, on_mesh = on_stages_and_data(layers_with(communicate))
    refused = rf"^accumulate: stages: XLA sends arrays of a layer .*collective-permute {words}.*; XLA has all devices"
    with on_mesh, pytest.raises(NotImplementedError, match=refused):
        step.lower(*args).compile()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_fast")
def test_whoever_compiles_it_is_told(monkeypatch):
    """Jitted or not, and `verify`. Without the mend this runs, and nothing hangs."""
    loss = layers_with(jnp.sin)
    monkeypatch.setattr(stage_collectives, "in_branches", lambda text: {"collective-permute": ["roll"]})
    step, args, on_mesh = on_stages_and_data(loss)
    told = lambda: pytest.raises(NotImplementedError, match=r"\(collective-permute for roll\); XLA has all devices")
    with on_mesh:
        for run in step, accumulate(loss, stages="stage"), lambda w, x: verify(lambda w, x: w - step(w, x)[1], w, x):
            with told():
                run(*args)


@pytest.mark.usefixtures("compiled_fast")
def test_how_many_layers_fit_is_said_of_the_whole_scan(monkeypatch):
    """4 slots of 2 layers and a row of padding fit, of 4 layers each that would offload; with `save` they do."""
    one = 4 * DIM * 4  # bytes of a layer's fc1
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(4 * 3 * one / 2**30))
    run = lambda loss: on_mesh(accumulate(loss, stages="stage"), (2, 1, 1), (PARAMS, X))
    with pytest.raises(HostPoolFull, match=r"8 layer\(s\) of 4 microbatches per stage .* \(offload_layers: 5\)"):
        run(stack_of(8))

    def loss(params, x):
        saving = Policy({"fc1": "offload"}, min_offload_bytes=0, on_host_full="save")
        return jnp.mean(scan(layer, x, of_layers(params), policy=saving, strict=False)[0])

    with pytest.warns(match="enough for 5, which offload"):
        got = run(loss)
    one = lambda params, x: jnp.mean(plain(layer, x, of_layers(params), {"fc1": "offload"})[0])
    assert_close(got, jax.device_get(jax.jit(one_by_one(one))(PARAMS, X)))


@pytest.mark.parametrize("how, words", [({"virtual_stages": 0}, "above 0"), ({"virtual_stages": 2}, "needs stages")])
def test_a_wrong_number_of_virtual_stages(how, words):
    with pytest.raises(ValueError, match=f"^accumulate: virtual_stages .* {words}"):
        accumulate(stack_of(8), **how)


def test_a_mesh_is_needed_and_its_axis_is_auto():
    with pytest.raises(ValueError, match=r"the mesh, which is empty; call it in jax\.set_mesh"):
        accumulate(stack_of(8), stages="stage")(PARAMS, X)
    mesh = jax.make_mesh((2,), ("stage",), (AxisType.Explicit,), devices=jax.devices()[:2])
    with (
        jax.set_mesh(mesh),
        pytest.raises(NotImplementedError, match="'stage' is Explicit; with stages all must be Auto"),
    ):
        accumulate(stack_of(8), stages="stage")(PARAMS, X)


@pytest.mark.slow
def test_a_single_stage_interleaves():
    args = PARAMS, tokens(3, rows=4)
    of = lambda stack: functools.partial(language_model, stack)
    expected = jax.jit(one_by_one(of(plain), has_aux=True))(*args)
    got = on_mesh(accumulate(of(ours), has_aux=True, stages="stage", virtual_stages=3), (1, 1, 1), args)
    assert_same_bits(jax.tree.leaves(got), jax.device_get(jax.tree.leaves(expected)))


def is_stack(path):
    return path[-1].key in ("w", "bias")


def in_groups(params, tokens):
    """`language_model`, whose layers are stored in groups."""
    in_order = lambda path, x: x.reshape(LAYERS, *x.shape[2:]) if is_stack(path) else x
    return language_model(ours, jax.tree_util.tree_map_with_path(in_order, params), tokens)


def staged(groups, microbatches=3, stages=2):
    """A step on two stages with two virtual stages, or on four, and its arguments, layers in groups for these or not; a
    context."""
    mesh = auto_mesh(stage=stages)

    def placed(path, x):
        if not is_stack(path):
            return jax.device_put(x, NamedSharding(mesh, P()))
        return jax.device_put(x.reshape(groups, -1, *x.shape[1:]), NamedSharding(mesh, P(None, "stage")))

    step = accumulate(in_groups, has_aux=True, stages="stage", virtual_stages=4 // stages)
    return step, (jax.tree_util.tree_map_with_path(placed, PARAMS), tokens(microbatches, rows=4)), jax.set_mesh(mesh)


@pytest.mark.slow
@pytest.mark.claim("stages")
@pytest.mark.usefixtures("compiled_fast")
def test_what_is_claimed_of_a_step_on_stages_holds():
    step, args, on_mesh = staged(groups=2)
    with on_mesh:
        checks = {check.claim: check for check in verify(step, *args)}
    held = {claim for claim, check in checks.items() if check.verdict == "holds"}
    assert held == {"gradients", "conservation", "moves", "producers", "placement", "repeats"}
    assert "each stage has 8 slots" in checks["conservation"].detail
    # In 7 ticks activations are sent on, and in as many cotangents back: two arrays each.
    assert checks["placement"].detail.startswith("28 arrays are sent to neighbours, as the traced step asks;")


def a_slot_of_another_microbatch(monkeypatch):
    real = Tick.read_slots.fget
    monkeypatch.setattr(Tick, "read_slots", property(lambda tick: [(slot + 2) % 8 for slot in real(tick)]))


def a_second_set_of_slots(monkeypatch):
    """Something is put on the host, and read there, that nobody needs there."""
    real = Chunks.empty_slot

    def again(chunks):
        slot, rows = real(chunks)
        put = lambda x: jax.device_put(lax.optimization_barrier(x), HOST)
        return slot._replace(residuals=[r._replace(host=list(map(put, r.host))) for r in slot.residuals]), rows

    monkeypatch.setattr(Chunks, "empty_slot", again)


PLANTED = {
    "a slot of another microbatch": (a_slot_of_another_microbatch, 2, gradients, "['bias']: 64 of 64 values"),
    "a second set of slots": (a_second_set_of_slots, 2, conservation, "beside its stacks and their rows the step puts"),
    "layers that are not on their stages": (lambda _: None, 1, placement, "1 all-gather of f32[2,4,8,8]"),
}


@pytest.mark.slow
@pytest.mark.claim("stages")
@pytest.mark.parametrize(
    "plant, groups, check, said",
    [pytest.param(*of, id=name, marks=[pytest.mark.long] * name.startswith("a slot")) for name, of in PLANTED.items()],
)
@pytest.mark.usefixtures("compiled_fast")
def test_a_fault_of_stages_fails_its_claim(plant, groups, check, said, monkeypatch):
    plant(monkeypatch)
    step, args, on_mesh = staged(groups)
    with on_mesh:
        verdict, detail = check(target_of(step, args))
    assert verdict == "fails" and said in detail, detail
