"""offload(): scans that others call become ours, wherever they stand; what stays, and what is refused, says so."""

import copy
import dataclasses
import functools
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from common import assert_same_bits, auto_mesh, fast_compiles, normal, policy, run_each, setting
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxoffload import Policy, PolicyError, accumulate, offload, residuals, scan, tag, verify
from jaxoffload._engine.host.need import need_of
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.layers.loops import backward_p, forward_p
from jaxoffload._engine.layers.scan_primitive import scan_p
from jaxoffload._engine.microbatches.interleaved import interleaved_p
from jaxoffload._jax import DEVICE

pytestmark = pytest.mark.claim("offload")

RULES = {"fc1": "offload"}
X, W = normal(0, (4, 8)), normal(1, (3, 8, 8)) / 3
remat = functools.partial(jax.checkpoint, policy=policy(RULES))


def mlp(x, w):
    return x + jnp.tanh(tag(x @ w, "fc1"))


def layer(x, w):
    return mlp(x, w), jnp.sum(x)


def stack(x, w):
    return lax.scan(remat(layer), x, w)[0]


# ---- where scans and checkpoints stand ----


def by_rows(f, **how):
    mesh = auto_mesh(d=4)
    return jax.shard_map(f, mesh=mesh, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"), **how)


def in_shard_map(x, w):
    """Its layers know the mesh's axis."""
    one = lambda x, w: (mlp(x, w) + lax.psum(jnp.sum(x), "d") / 9, None)
    return by_rows(lambda x, w: lax.scan(remat(one), x, w)[0])(x, w)


def several_in_a_layer(x, w):
    def one(x, w):
        return jnp.sin(remat(mlp)(remat(mlp)(jnp.cos(x), w), w.T)), None

    return lax.scan(one, x, w)[0]


def one_twice_in_a_layer(x, w):
    """JAX traces it once."""
    run = remat(mlp)
    return lax.scan(lambda x, w: (run(run(x, w), w), None), x, w)[0]


def in_a_branch_of_a_layer(x, w):
    one = lambda x, w: (lax.cond(x[0, 0] > 0, remat(mlp), lambda x, w: x @ w, x, w), None)
    return lax.scan(one, x, w)[0]


def jitted_in_a_layer(x, w):
    return lax.scan(jax.jit(lambda x, w: jax.jit(remat(layer))(x, w)), x, w)[0]


def in_a_layer_and_in_a_scan_of_it(x, w):
    return lax.scan(lambda x, w: (stack(remat(mlp)(x, w), W), None), x, w)[0]


def several_arrays_carried(x, w):
    one = lambda carry, w: ((mlp(carry[0], w), carry[1] + 1, carry[2] * 0.5 + carry[0]), None)
    return lax.scan(remat(one), (x, 0, x), w)[0][2]


PLACES = {
    "a scan": stack,
    "in jit": lambda x, w: jax.jit(stack)(x, w),
    "in shard_map": in_shard_map,
    "in cond": lambda x, w: lax.cond(jnp.sum(x) < 99, stack, lambda x, w: x, x, w),
    "in a scan": lambda x, w: lax.scan(lambda x, _: (stack(x, w), None), x, length=2)[0],
    "in a checkpoint": lambda x, w: jax.checkpoint(stack)(x, w),
    "in a checkpoint under a policy": lambda x, w: remat(lambda x, w: stack(jnp.sin(tag(x, "fc1")), w))(x, w),
    "in vmap": lambda x, w: jax.vmap(stack, (0, None))(jnp.stack([x, x + 1]), w),
    "reversed and unrolled": lambda x, w: lax.scan(remat(layer), x, w, reverse=True, unroll=2)[0],
    "several checkpoints in a layer": several_in_a_layer,
    "one twice in a layer": one_twice_in_a_layer,
    "in a branch of a layer": in_a_branch_of_a_layer,
    "jitted in a layer": jitted_in_a_layer,
    "in a layer, and in a scan of it": in_a_layer_and_in_a_scan_of_it,
    "several arrays carried": several_arrays_carried,
}


def gradients_of(f):
    return jax.value_and_grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1))


def test_gradients_are_those_of_the_function_wherever_scans_stand():
    fs = [*map(offload, PLACES.values()), *PLACES.values()]
    results = run_each([gradients_of(f) for f in fs], X, W)
    for name, ours, theirs in zip(PLACES, results[: len(PLACES)], results[len(PLACES) :], strict=True):
        try:
            assert_same_bits(ours, theirs)
        except AssertionError as differs:
            raise AssertionError(name) from differs


def in_and_out(x, w, inside, outside):
    return remat(lambda x, w, c: jnp.tanh(tag(x @ w @ c, "fc1")))(x, w, inside) @ outside


# A layer that reads a constant of the scan, and whether it does so at several places.
CONSTANTS = {
    "in its checkpoint": (
        lambda x, w, c: remat(lambda x, w, c: jnp.sin(x @ c) @ w @ c + mlp(x, w) @ c)(x, w, c),
        False,
    ),
    "outside": (lambda x, w, c: remat(mlp)(x, w) @ c, False),
    "outside, in one function": (lambda x, w, c: jax.jit(lambda x, c: jnp.sin(x @ c) @ c)(remat(mlp)(x, w), c), False),
    "twice outside": (lambda x, w, c: remat(mlp)(x @ c, w) @ c, True),
    "in and outside": (lambda x, w, c: in_and_out(x, w, c, c), True),
    "in two checkpoints": (lambda x, w, c: remat(mlp)(remat(mlp)(x, c) @ w, c), True),
}


@pytest.mark.claim("one-sum")
@pytest.mark.parametrize("one, several", CONSTANTS.values(), ids=CONSTANTS)
def test_only_a_constant_that_a_layer_reads_at_several_places_is_summed_in_another_order(one, several):
    c = normal(2, (8, 8)) / 3
    loss = lambda x, w, c: jnp.sum(lax.scan(lambda x, w: (one(x, w, c), None), x, w)[0] ** 2)
    (*ours, of_c), (*theirs, wanted) = run_each([jax.grad(f, (0, 1, 2)) for f in (offload(loss), loss)], X, W, c)
    assert_same_bits(ours, theirs)
    if not several:
        assert_same_bits([of_c], [wanted])


@pytest.mark.parametrize("f", PLACES.values(), ids=PLACES)
def test_the_layers_are_run_by_our_loops_and_offload(f):
    jaxpr = jax.make_jaxpr(gradients_of(offload(f)))(X, W)
    assert {forward_p, backward_p} <= {site.eqn.primitive for site in walk(jaxpr)}
    assert need_of(jaxpr).bytes() > 0


def count(primitive, f, *args):
    return sum(site.eqn.primitive is primitive for site in walk(jax.make_jaxpr(f)(*args)))


def test_all_scans_are_found_and_shared_functions_stay_shared():
    assert count(scan_p, offload(in_a_layer_and_in_a_scan_of_it), X, W) == 2
    shared = jax.jit(stack)
    loss = lambda x, w: jnp.sum(shared(shared(shared(x, w), w), w))
    text = jax.jit(jax.grad(offload(loss))).lower(X, W).as_text()
    assert text.count("stablehlo.while") == jax.jit(jax.grad(loss)).lower(X, W).as_text().count("stablehlo.while")
    again = offload(offload(loss))
    assert count(scan_p, again, X, W) == count(scan_p, offload(loss), X, W) == 3


def test_several_checkpoints_in_a_layer_take_no_more_memory_and_work_than_jaxs():
    """Each is recomputed by itself, from what it read. On a CPU all residuals are on the device."""
    x, w = normal(0, (512, 64)), normal(1, (4, 6, 64, 64)) / 9
    one = remat(lambda x, w: x + jnp.tanh(tag(jnp.sin(x @ w) @ w.T, "fc1")), policy=policy({"fc1": "recompute"}))
    group = lambda x, w: (functools.reduce(one, w, x), None)
    loss = lambda x, w: jnp.sum(lax.scan(group, x, w)[0] ** 2)

    def needs(f):
        program = jax.jit(jax.grad(f, (0, 1))).lower(x, w).compile()
        return program.memory_analysis().temp_size_in_bytes, program.cost_analysis()["flops"]

    (bytes_, flops), (bytes_of_jax, flops_of_jax) = needs(offload(loss)), needs(loss)
    assert bytes_ <= 1.05 * bytes_of_jax and flops <= 1.02 * flops_of_jax
    table = residuals(offload(loss), x, w)
    assert [row.state for row in table if row.names == ("checkpoint_input.0",)] == ["saved"]


def test_what_several_checkpoints_in_a_layer_offload_is_not_copied_again_in_the_backward_pass():
    sites = walk(jax.make_jaxpr(gradients_of(offload(several_in_a_layer)))(X, W))
    backward = [site.eqn for site in sites if any(eqn.primitive is backward_p for eqn in site.enclosing)]
    assert {eqn.params["devices"] for eqn in backward if eqn.primitive.name == "device_put"} == {(DEVICE,)}


def test_a_checkpoint_outside_of_scans_is_ours():
    loss = lambda x, w: jnp.sum(remat(mlp)(x, w[0]) ** 2)
    assert_same_bits(*run_each([jax.grad(f, (0, 1)) for f in (offload(loss), loss)], X, W))
    assert [row.state for row in residuals(offload(loss), X, W) if row.names == ("fc1",)] == ["offloaded"]


# ---- names ----


def test_what_a_scan_carries_has_a_name():
    loss = lambda rules, f: lambda x, w: jnp.sum(lax.scan(remat(f, policy=policy(rules)), x, w)[0] ** 2)
    rows = lambda table: {row.names: row.state for row in table if row.kind == "value" and row.layers == 2}
    found = residuals(offload(loss({"layer_input": "offload"}, layer)), X, W)
    assert rows(found)["layer_input",] == "offloaded"
    named = residuals(offload(loss({"mine": "offload"}, lambda x, w: layer(tag(x, "mine"), w))), X, W)
    assert rows(named)["mine",] == "offloaded" and not any("layer_input" in row.names for row in named)
    constrained = lambda x, w: layer(tag(lax.reduce_precision(x, 8, 23), "mine"), w)
    everything = residuals(offload(loss({"*": "save", "mine": "offload"}, constrained)), X, W)
    assert rows(everything)["mine",] == "offloaded"  # one name, one decision
    kept = lambda carry, w: ((mlp(carry[0] * carry[1], w), carry[1]), None)
    mask = lambda x, w: jnp.sum(lax.scan(remat(kept), (x, jnp.cos(x)), w)[0][0])
    assert not any("layer_input.1" in row.names for row in residuals(offload(mask), X, W))
    numbered = residuals(offload(lambda x, w: jnp.sum(several_arrays_carried(x, w))), X, W)
    assert {"layer_input.0", "layer_input.1"} <= {name for row in numbered for name in row.names}


def test_a_pattern_must_match_a_name_in_one_of_all_stacks():
    both = policy({"fc1": "offload", "fc2": "offload"})
    second = lambda x, w: (x + jnp.tanh(tag(x @ w, "fc2")), None)

    def loss(rules, x, w):
        x = lax.scan(remat(layer, policy=rules), x, w)[0]
        return jnp.sum(lax.scan(remat(second, policy=rules), x, w)[0] ** 2)

    table = residuals(offload(functools.partial(loss, both)), X, W)
    assert {row.names for row in table if row.state == "offloaded"} == {("fc1",), ("fc2",)}
    wrong = policy({"fc1": "offload", "fc3": "offload"})
    with pytest.raises(
        PolicyError, match=r"fc3.*matches no tagged value; the names tagged under the policy are fc1, fc2, layer_input"
    ):
        offload(functools.partial(loss, wrong))(X, W)
    offload(functools.partial(loss, wrong), strict=False)(X, W)


SURVIVES = {
    "pickle": lambda policy: pickle.loads(pickle.dumps(policy)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": dataclasses.replace,
    "asdict": lambda policy: Policy(**dataclasses.asdict(policy)),
    "YAML": lambda policy: Policy(**yaml.safe_load(yaml.safe_dump(dataclasses.asdict(policy)))),
    "JSON": lambda policy: Policy(**json.loads(json.dumps(dataclasses.asdict(policy)))),
    "repr": lambda policy: eval(repr(policy)),
}


@pytest.mark.claim("policy-survives")
@pytest.mark.parametrize("way", SURVIVES.values(), ids=SURVIVES)
def test_a_policy_survives_what_frameworks_do_to_it(way):
    mine = Policy({"fc1": "offload", "attn/*": "save"}, offload_modules=["moe_act"], offload_layers=0.5)
    assert mine.rules  # cached in it
    again = way(mine)
    assert again == mine and hash(again) == hash(mine) and again.rules == mine.rules


@dataclasses.dataclass
class Remat:
    """As a framework's config holds the arguments of `jax.checkpoint`."""

    policy: Policy
    prevent_cse: bool = False


@pytest.mark.claim("policy-survives")
@pytest.mark.parametrize("place", ["scan", "checkpoint", "cond"])
def test_a_policy_may_be_the_dict_that_a_framework_makes_of_it(place):
    def loss(x, w, as_dict):
        config = Remat(policy(RULES, resident_layers=0))
        f = jax.checkpoint(layer, **(dataclasses.asdict(config) if as_dict else vars(config)))
        if place == "checkpoint":
            return jnp.sum(f(x, w[0])[0] ** 2)
        run = lambda x, w: jax.jit(lambda x, w: lax.scan(f, x, w))(x, w)[0]
        y = lax.cond(x[0, 0] > 9, lambda x, w: x, run, x, w) if place == "cond" else run(x, w)
        return jnp.sum(y**2)

    of_dict, plain = (functools.partial(loss, as_dict=as_dict) for as_dict in (True, False))
    assert_same_bits(*run_each([jax.grad(f, (0, 1)) for f in (offload(of_dict), plain)], X, W))
    assert str(residuals(offload(of_dict), X, W)) == str(residuals(offload(plain), X, W))


def test_a_wrong_dict_says_what_is_wrong():
    wrong = jax.checkpoint(layer, policy={"residuals": {"fc1": "ofload"}})
    with pytest.raises(PolicyError, match=r"ofload.*the nearest is 'offload'"):
        offload(lambda x, w: lax.scan(wrong, x, w)[0])(X, W)
    misspelt = jax.checkpoint(layer, policy={"residuals": {"fc1": "offload"}, "defualt": "save"})
    with pytest.raises(PolicyError, match=r"^offload: 'defualt' is not a field of a Policy; the nearest is 'default'$"):
        offload(lambda x, w: lax.scan(misspelt, x, w)[0])(X, W)


@pytest.fixture(params=[False, True], ids=["custom_vjp", "custom_vjp3"])
def custom_vjp3(request):
    """JAX's next `jax.custom_vjp`, in jax 0.11 for what is decorated meanwhile; or that of today."""
    with setting("jax_custom_vjp3", request.param):
        yield


def test_a_name_that_only_a_forward_rule_gives_counts(custom_vjp3):
    """As attention kernels name what they return; also inside a `shard_map`."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    def forward(x, w):
        y = tag(x @ w, "kernel")
        return y, (y, x, w)

    product.defvjp(forward, lambda kept, ct: ((ct * kept[0]) @ kept[2].T, kept[1].T @ (ct * kept[0])))
    rules = policy({"kernel": "offload"}, resident_layers=0)
    layer = lambda x, w: (product(x, w), None)
    stack = lambda rules: lambda x, w: lax.scan(jax.checkpoint(layer, policy=rules), x, w)[0]
    for shape in (lambda f: f, functools.partial(by_rows, check_vma=False)):
        loss = lambda rules, shape=shape: lambda x, w: jnp.sum(shape(stack(rules))(x, w) ** 2)
        table = residuals(offload(loss(rules)), X, W)
        assert {row.names for row in table if row.state == "offloaded"} == {("kernel",)}
        with pytest.raises(
            PolicyError, match=r"kernal.*the names tagged under the policy are kernel, layer_input.*nearest is 'kernel'"
        ):
            offload(loss(policy({"kernal": "offload"})))(X, W)


# ---- what stays, and what is refused ----


def test_a_scan_that_stays_says_why_and_its_checkpoints_are_ours():
    def one(x, w):
        return remat(mlp, policy=policy({"fc1": "save"}))(remat(mlp)(x, w), w), None

    loss = lambda x, w: jnp.sum(lax.scan(one, x, w)[0] ** 2)
    with pytest.warns(UserWarning, match=r"a scan of 3 layers stays lax.scan: its layers are under 2 policies"):
        got, want = run_each([jax.grad(f, (0, 1)) for f in (offload(loss), loss)], X, W)
    assert_same_bits(got, want)


@jax.custom_vjp
def ruled(x, w):
    return stack(x, w)


ruled.defvjp(lambda x, w: jax.vjp(stack, x, w), lambda vjp, ct: vjp(ct))


@jax.custom_vjp
def ruled_under_offload(x, w):
    return stack(x, w)


ruled_under_offload.defvjp(lambda x, w: jax.vjp(offload(stack), x, w), lambda vjp, ct: vjp(ct))


def test_custom_derivatives_stay_and_offload_in_their_rules_is_ours():
    loss = lambda f: lambda x, w: jnp.sum(f(x, w) ** 2)
    grads = lambda *fs: run_each([jax.grad(f, (0, 1)) for f in fs], X, W)
    with pytest.warns(UserWarning, match=r"in a function with a custom derivative.*wrap that in jaxoffload.offload"):
        (got,) = grads(offload(loss(ruled)))
    with pytest.warns(UserWarning, match="custom derivative"):
        assert "custom derivative" in residuals(offload(loss(ruled)), X, W).notes[0]
    ours = loss(ruled_under_offload)
    assert count(forward_p, jax.grad(ours, (0, 1)), X, W) == 1
    got_inside, want = grads(ours, loss(stack))
    for each in (got, got_inside):
        assert_same_bits(each, want)


def test_constant_results_are_arrays():
    """Outside of jit JAX gives a jaxpr's constants as Python's and NumPy's; Equinox would take a bool to be static."""

    def loss(x, w):
        y = jnp.sum(lax.scan(remat(lambda x, w: (mlp(x, w), None)), x, w)[0] ** 2)
        return y, {"flag": jnp.array(False), "n": jnp.array(3), "ids": jnp.asarray([1, 2]), "half": jnp.float16(0.5)}

    got, want = (jax.value_and_grad(f, has_aux=True)(X, W)[0][1] for f in (offload(loss), loss))
    kind = lambda x: (isinstance(x, jax.Array), x.dtype, x.shape, x.aval.weak_type)
    assert jax.tree.map(kind, got) == jax.tree.map(kind, want)


def test_layers_that_write_to_a_ref_stay():
    def loss(x, w):
        count = jax.new_ref(jnp.zeros(()))

        def one(x, w):
            count[...] += 1.0
            return mlp(x, w), None

        return jnp.sum(lax.scan(remat(one), x, w)[0] ** 2) + lax.stop_gradient(count[...])

    with pytest.warns(UserWarning, match="a jax.checkpoint stays as it is: it reads or writes a jax.new_ref"):
        got, want = run_each([offload(loss), loss], X, W)
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda: offload(lambda x, w: lax.scan(jax.checkpoint(layer), x, w)[0])(X, W), ValueError, "has nothing under"),
        (
            lambda: offload(jax.grad(lambda *args: jnp.sum(stack(*args))))(X, W),
            NotImplementedError,
            r"jax.grad\(offload\(loss\)\)",
        ),
        (lambda: offload(3), TypeError, "offload: f must be a function, got 3"),
        (lambda: offload(stack, strict="yes"), TypeError, "offload: strict must be .*, got 'yes'"),
    ],
)
def test_what_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


# ---- calls ----


def test_any_arguments_and_results():
    def loss(params, x, *, key, scale=1.0, how="sum", none=None):
        assert none is None and isinstance(scale, float)
        y = stack(x, params["w"]) * scale + jax.random.normal(key, x.shape)
        return getattr(jnp, how)(y**2), {"y": y, "first": (y[0],)}

    args, keywords = ({"w": W}, np.asarray(X)), {"key": jax.random.key(0), "scale": 2.0, "how": "mean"}
    ours, theirs = (jax.value_and_grad(f, has_aux=True) for f in (offload(loss), loss))
    assert_same_bits(*run_each([functools.partial(f, **keywords) for f in (ours, theirs)], *args))

    others = lambda w, x, dtype, text: (jnp.sum(stack(x, w) ** 2).astype(dtype), text)
    assert offload(others)(W, X, jnp.float32, "a string")[1] == "a string"
    with jax.disable_jit():
        offload(lambda x, w: jnp.sum(stack(x, w)))(X, W)
    step = jax.jit(lambda w, x: w - jax.grad(offload(lambda w, x: jnp.sum(stack(x, w) ** 2)))(w, x), donate_argnums=0)
    compiled = step.lower(W, X).compile()
    assert compiled(jnp.copy(W), X).shape == W.shape
    assert offload(loss).__name__ == "loss"


def test_what_takes_a_loss_takes_it():
    loss = lambda w, x: jnp.sum(stack(x, w) ** 2)
    assert all(check.verdict in ("holds", "not checked") for check in verify(offload(loss), W, X))
    microbatches = jnp.stack([X, X + 1, X - 1])
    jaxpr = jax.make_jaxpr(accumulate(offload(loss)))(W, microbatches)
    assert any(site.eqn.primitive is interleaved_p for site in walk(jaxpr))
    by_hand = lambda w, x: jnp.sum(scan(layer, x, w, policy=policy(RULES))[0] ** 2)
    in_parts = lambda w, x: jnp.sum(in_shard_map(x, w) ** 2)
    ours, ours_by_hand, ours_in_parts, parts = run_each([offload(loss), by_hand, offload(in_parts), in_parts], W, X)
    assert_same_bits(ours, ours_by_hand)
    assert_same_bits(ours_in_parts, parts)


# ---- frameworks ----


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.dropout, self.calls = nnx.Dropout(0.5, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return x + self.down(self.dropout(nnx.gelu(checkpoint_name(self.up(x), "fc1"))))


@pytest.mark.slow
def test_nnx_modules_are_arguments_and_what_layers_change_in_them_is_changed():
    make = nnx.split_rngs(splits=3)(nnx.vmap(Nnx))
    run = nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
        nnx.remat(lambda layer, x: layer(x), policy=policy(RULES))
    )
    loss = lambda layers, x, power=2: jnp.sum(run(layers, x) ** power)
    with fast_compiles():
        ours, theirs = make(nnx.Rngs(0)), make(nnx.Rngs(0))
    steps, values = [nnx.jit(nnx.value_and_grad(f)) for f in (offload(loss), loss)], []
    sown = lambda layers: setattr(layers, "new", nnx.Variable(jnp.ones(3)))  # as `sow` adds a variable
    for _ in range(2):
        got, want = (step(m, X) for step, m in zip(steps, (ours, theirs), strict=True))
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)
        values.append(float(got[0]))
    assert values[0] != values[1]  # another mask
    with pytest.raises(NotImplementedError, match=r"changes more of a module of Flax NNX than .* or by eval\(\)"):
        offload(lambda layers, x: (layers.eval(), loss(layers, x))[1])(ours, X)
    assert ours.calls[...].tolist() == theirs.calls[...].tolist() == [2, 2, 2]
    with pytest.raises(NotImplementedError, match=r"changes more of a module of Flax NNX than"):
        offload(lambda layers, x: (layers.eval(), sown(layers), loss(layers, x))[2])(ours, X)
    offload(lambda layers, x: (sown(layers), loss(layers, x))[1])(theirs, X)
    assert theirs.new[...].tolist() == [1, 1, 1]
