"""The ten rules of a policy, each with its tests, on small functions whose residuals can be counted by hand."""

import contextlib
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import pytest
from autodiff import count, gradient, gradient_jaxpr, in_a_loop, kept, kept_bytes, saving
from common import assert_same_bits, auto_mesh, normal, policy, run_each
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from softmax_kernel import kernels, softmax

from jaxoffload import PolicyError, accumulate, chain, check, checkpoint, residuals, scan, scope, tag

pytestmark = pytest.mark.claim("ten-rules")

X, W = normal(0, (4, 8)), normal(1, (8, 8)) * 0.5
P = jax.P
ONE = 4 * 8 * 4  # bytes of a float32 (4, 8)
HOST, DEVICE = ("host", "float32", (4, 8)), ("device", "float32", (4, 8))


def under(f, rules=(), **fields):
    return checkpoint(f, policy=policy(rules, **fields))


def states(f, *args, **kwargs):
    """Return name -> (state, reason)."""
    return {name: (r.state, r.reason) for r in residuals(f, *args, **kwargs) for name in r.names}


def fails(f, *args):
    with pytest.raises(PolicyError) as error:
        jax.make_jaxpr(gradient(f))(*args)
    return str(error.value)


# ---------------------------------------------------------------------------------------------- 1


def two_scopes(x, w):
    for name in ("attn", "mlp"):
        with scope(name):
            fc1 = tag({"gate": x @ w, "up": x @ (w + 1)}, "fc1")
            x = jnp.sin(tag(fc1["gate"] * fc1["up"], "act"))
    return x


@pytest.mark.claim("tags")
def test_rule_1_matching_by_last_component_scope_field_and_order():
    f = under(two_scopes, {"fc1": "offload", "attn/*": "save", "mlp/fc1.up": "recompute"})
    found = {name: state for name, (state, _) in states(f, X, W).items()}
    assert found == {
        "attn/fc1.gate": "saved",
        "attn/fc1.up": "saved",
        "attn/act": "saved",
        "mlp/fc1.gate": "offloaded",
        "mlp/fc1.up": "recomputed",
        "mlp/act": "recomputed",
    }
    assert kept(f, X, W)[HOST] == 1 and kept(f, X, W)[DEVICE] == 3


def attention(x, w):
    x = tag(x * 2, "layer_input")
    with scope("attn"):
        return jnp.sin(tag(jnp.sin(tag(jnp.sin(tag(jnp.sin(tag(x @ w, "q")), "k")), "v")) @ w, "context") @ w)


def test_rule_1_megatrons_modules_are_offloaded_unless_residuals_say_otherwise():
    f = under(attention, {"k": "save", "attn/v": "recompute"}, offload_modules=["core_attn", "attn_norm"])
    assert states(f, X, W) == {
        "layer_input": ("offloaded", "attn_norm (offload_modules)"),
        "attn/q": ("offloaded", "core_attn (offload_modules)"),
        "attn/k": ("saved", "k"),
        "attn/v": ("recomputed", "attn/v"),
        "attn/context": ("offloaded", "core_attn (offload_modules)"),
    }
    assert kept(f, X, W) == {HOST: 3, DEVICE: 1}


def test_rule_1_the_report_translates_megatrons_modules():
    p = policy({"q": "save"}, offload_modules=["core_attn", "attn_proj"])
    step = lambda x, w: (attention(x, w), None)
    f = lambda x, w: scan(step, x, jnp.stack([w, w]), policy=p)[0]
    for table in (residuals(attention, X, W, policy=p), residuals(f, X, W)):
        lines = str(table).splitlines()
        assert lines.count("offload_modules: core_attn -> attn/q, attn/k, attn/v, attn/context") == 1
        assert lines.count("offload_modules: attn_proj -> attn/context") == 1
        (offloaded,) = [r for r in table if r.names == ("attn/context",) and r.state == "offloaded" and r.layers]
        assert offloaded.reason == "core_attn, attn_proj (offload_modules)"
    assert "offload_modules" not in str(residuals(attention, X, W, policy=policy({"q": "save"})))


# ---------------------------------------------------------------------------------------------- 2


@pytest.mark.claim("two-names")
def test_rule_2_nested_tags_are_one_value_kept_once():
    f = lambda x, w: jnp.sin(tag(tag(x @ w, "inner"), "outer"))
    for rules in ({"inner": "offload", "outer": "offload"}, {"inner": "offload"}, {"outer": "offload"}):
        assert kept(under(f, rules), X, W) == {HOST: 1}
    assert states(under(f, {"outer": "save"}), X, W)["inner"] == ("saved", "outer")


@pytest.mark.claim("two-names")
def test_rule_2_sibling_tags_are_one_value_kept_once():
    def f(x, w):
        h = x @ w
        return jnp.sin(tag(h, "p")) * jnp.cos(tag(h, "q"))

    assert kept(under(f, {"p": "save", "q": "save"}), X, W) == {DEVICE: 1}
    assert kept(under(f, {"p": "offload"}), X, W) == {HOST: 1}


def in_jit_and_rounded(x, w):
    h = jax.jit(lambda x: tag(x @ w, "outside"))(x)
    h = lax.reduce_precision(h, exponent_bits=8, mantissa_bits=23)
    return jax.jit(lambda h: jnp.sin(tag(h, "inside")))(h)


def an_operand_of_a_cond(x, w):
    h = tag(x @ w, "outside")
    return lax.cond(x[0, 0] > 0, lambda h: jnp.sin(tag(h, "inside")), lambda h: jnp.cos(h), h)


def constrained(x, w):
    rows = jax.NamedSharding(auto_mesh(data=4), P("data"))
    return jnp.sin(tag(lax.with_sharding_constraint(tag(x @ w, "outside"), rows), "inside"))


@pytest.mark.parametrize("f", [in_jit_and_rounded, an_operand_of_a_cond, constrained])
def test_rule_2_one_value_through_what_passes_it_on(f):
    for rules in ({"inside": "offload", "outside": "offload"}, {"inside": "offload"}):
        assert kept(under(f, rules), X, W)[HOST] == 1
    assert "'inside' is save" in fails(under(f, {"inside": "save", "outside": "offload"}), X, W)


def test_rule_2_one_value_through_custom_vjp():
    @jax.custom_vjp
    def f(x, w):
        return jnp.sin(x @ w)

    def forward(x, w):
        out = checkpoint_name(jnp.sin(x @ w), "inside")
        return out, (out, w)

    f.defvjp(forward, lambda res, ct: ((ct * res[0]) @ res[1].T, jnp.zeros_like(res[1])))
    g = lambda x, w: jnp.exp(tag(f(x, w), "outside"))
    both = under(g, {"inside": "offload", "outside": "offload"})
    assert kept(both, X, W) == {HOST: 1}
    assert count(gradient_jaxpr(both, X, W), "sin") == 1
    assert kept(under(g, {"outside": "offload"}), X, W) == {HOST: 1}  # the rule's own residual is the same value
    assert "'outside' is offload" in fails(under(g, {"inside": "save", "outside": "offload"}), X, W)


def test_rule_2_different_decisions_are_an_error_that_shows_both():
    f = lambda x, w: jnp.sin(tag(tag(x @ w, "a"), "b"))
    said = fails(under(f, {"a": "save", "b": "offload"}), X, W)
    assert "'a' is save by residuals['a']" in said and "'b' is offload by residuals['b']" in said


def test_rule_2_names_that_share_a_result_of_a_cond_are_not_both_saved_and_offloaded():
    def f(x, w):
        return jnp.sin(lax.cond(x[0, 0] > 0, lambda: tag(jnp.sin(x @ w), "p"), lambda: tag(jnp.cos(x @ w), "q")))

    said = fails(under(f, {"p": "save", "q": "offload"}), X, W)
    assert "'p' is save by 'p'" in said and "'q' is offload by 'q'" in said
    assert "share one result of a cond" in said
    skip = lambda x, w: lax.cond(x[0, 0] > 0, lambda: tag(jnp.sin(x @ w), "p"), lambda: tag(x, "layer_input"))
    assert kept(under(lambda x, w: jnp.sin(skip(x, w)), {"p": "offload", "layer_input": "save"}), X, W)[HOST] == 1


# ---------------------------------------------------------------------------------------------- 3


@pytest.mark.claim("tags")
def test_rule_3_keep_beats_every_pattern():
    f = lambda x, w: jnp.sin(tag(x @ w, "fc1", keep=True))
    for rules in ({"**": "offload"}, {"fc1": "recompute"}, {}):
        assert kept(under(f, rules), X, W) == {DEVICE: 1}
        assert states(under(f, rules), X, W)["fc1"] == ("saved", "keep=True")
    two = lambda x, w: jnp.sin(tag(tag(x @ w, "a"), "b", keep=True))
    assert kept(under(two, {"a": "offload", "b": "recompute"}), X, W) == {DEVICE: 1}


@pytest.mark.claim("always-saved")
def test_rule_3_tagged_integers_booleans_and_keys_stay_saved():
    def f(x, w):
        key = tag(jax.random.fold_in(jax.random.key(0), 7), "key")
        mask = tag(jax.random.bernoulli(key, 0.5, x.shape), "mask")
        scores = x @ w
        ids = tag(lax.top_k(scores, 2)[1], "routing")
        return jnp.take_along_axis(jnp.where(mask, scores, 0.0), ids, 1)

    for decision in ("offload", "recompute"):
        g = under(f, {"**": decision})
        held = kept(g, X, W)
        assert held["device", "bool", (4, 8)] == 1 and held["device", "int32", (4, 2)] == 1
        jaxpr = gradient_jaxpr(g, X, W, argnums=(0, 1))
        assert count(jaxpr, "top_k") == 1 and count(jaxpr, "random_fold_in") == 1
        assert states(g, X, W)["routing"] == ("saved", "integers are always saved")


def test_rule_3_patterns_beat_the_default_and_untagged_values_follow_jax():
    f = lambda x, w: jnp.sin(jnp.sin(tag(jnp.sin(tag(x @ w, "a")), "b")))
    assert kept(under(f, {"a": "recompute"}, default="offload"), X, W) == {HOST: 1}
    assert states(under(f, {"a": "recompute"}, default="offload"), X, W)["b"] == ("offloaded", "default")


# ---------------------------------------------------------------------------------------------- 4


def dots(x, w):
    h = jnp.sin(tag(x @ w, "fc1"))
    h = jnp.sin(h @ w)
    return jnp.sin(jnp.einsum("bij,bjk->bik", h[None], w[None])[0])


def test_rule_4_dots_keep_untagged_matmuls_without_batch_dimensions():
    assert kept(under(dots, {"fc1": "recompute"}, dots="save"), X, W) == {DEVICE: 1}
    assert kept(under(dots, {"fc1": "recompute"}, dots="offload"), X, W) == {HOST: 1}
    found = states(under(dots, {"fc1": "recompute"}, dots="offload"), X, W)
    assert found["(matmul)"] == ("offloaded", "dots")


@pytest.mark.claim("recompute-wins")
def test_rule_4_a_tag_marked_recompute_does_not_keep_its_dot():
    f = under(lambda x, w: jnp.sin(tag(x @ w, "fc1")), {"fc1": "recompute"}, dots="save")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert kept(f, X, W) == {}
        assert count(gradient_jaxpr(f, X, W, argnums=(0, 1)), "dot_general") == 1 + 1 + 2


def test_rule_4_not_inside_custom_vjp_forward_rules():
    @jax.custom_vjp
    def matmul(x, w):
        return x @ w

    matmul.defvjp(lambda x, w: (jnp.sin(x @ w), (x, w, x @ w)), lambda r, ct: (ct @ r[1].T * r[2], r[0].T @ ct))
    f = under(lambda x, w: jnp.sin(matmul(jnp.sin(x @ w), w)), dots="save")
    assert kept(f, X, W) == {DEVICE: 1}


def test_rule_4_the_warning_points_to_the_user_and_comes_once_in_a_scan():
    f = under(lambda x, w: jnp.sin(tag(x @ w, "fc1")), {"fc1": "save"}, dots="save")
    with pytest.warns(UserWarning, match="dots: save matched nothing") as seen:
        jax.make_jaxpr(jax.grad(lambda x, w: lax.scan(lambda x, w: (f(x, w), None), x, w)[0].sum()))(X, WS)
    assert [w.filename for w in seen] == [__file__]
    with pytest.warns(UserWarning, match="dots: save matched nothing"):
        assert any("dots: save matched nothing" in note for note in residuals(f, X, W).notes)


def test_rule_5_a_default_without_names_says_so():
    f = under(lambda x, w: jnp.sin(x @ w), default="offload")
    with pytest.warns(UserWarning, match="default: offload matched nothing: the function has no tagged value"):
        jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(f(x, w))))(X, W)
    with pytest.warns(UserWarning, match="default: offload matched nothing"):
        assert "default: offload matched nothing" in "".join(residuals(f, X, W).notes)
    named = under(lambda x, w: jnp.sin(tag(x @ w, "fc1")), default="offload")
    assert "matched nothing" not in "".join(residuals(named, X, W).notes)


# ---------------------------------------------------------------------------------------------- 5


@pytest.mark.claim("what-is-where", "misspelt")
def test_rule_5_a_pattern_without_a_match_names_the_nearest():
    said = fails(under(two_scopes, {"fc1": "save", "atn/act": "offload"}), X, W)
    assert "residuals['atn/act']" in said and "the nearest is 'attn/act'" in said and "mlp/fc1.gate" in said
    assert "residuals['fc1']" not in said


def test_rule_5_a_pattern_that_a_scope_would_complete_says_so():
    def local(x, w):
        with scope("local"):
            return two_scopes(x, w)

    said = fails(under(local, {"attn/*": "save"}), X, W)
    assert said.endswith("; in all scopes it is '**/attn/*', which matches local/attn/act")


def test_rule_5_a_module_without_a_match_is_named():
    said = fails(under(two_scopes, offload_modules=["attn_proj", "core_attn"]), X, W).splitlines()
    assert [line.partition(":")[0] for line in said] == [
        "offload_modules['core_attn'] -> 'attn/q'",
        "offload_modules['core_attn'] -> 'attn/k'",
        "offload_modules['core_attn'] -> 'attn/v'",
        "offload_modules['attn_proj', 'core_attn'] -> 'attn/context'",
    ]
    listed = ["matches no tagged value; the names tagged under the policy are attn/act, " in line for line in said]
    assert listed == [True, False, False, False] and all("matches no tagged value; " in line for line in said)
    assert "the nearest is 'attn/act'" in said[-1]
    loose = policy(offload_modules=["moe_act"])
    f = checkpoint(two_scopes, policy=loose, strict=False)
    with pytest.raises(
        PolicyError, match=r"offload_modules\['moe_act'\] -> 'moe/fc1': matches no tagged.*nearest is 'mlp/fc1"
    ):
        check(f, X, W, policy=loose)


@pytest.mark.claim("several-stacks")
def test_rule_5_several_stacks_share_one_policy_under_check():
    def model(rules):
        p = policy(rules)

        def loss(x, w):
            x = checkpoint(lambda x: jnp.sin(tag(x @ w, "dense")), policy=p, strict=False)(x)
            return scan(lambda x, _: (jnp.sin(tag(x @ w, "moe")), None), x, length=2, policy=p, strict=False)[0].sum()

        return p, loss

    p, loss = model({"dense": "save", "moe": "save"})
    for f in (loss, jax.grad(loss), jax.jit(jax.value_and_grad(loss))):
        check(f, X, W, policy=p)
    p, loss = model({"dense": "save", "mo": "save"})
    for f in (loss, jax.jit(jax.grad(loss))):
        with pytest.raises(PolicyError, match=r"residuals\['mo'\].*nearest is 'moe'"):
            check(f, X, W, policy=p)
    with pytest.raises(ValueError, match="has this policy"):
        check(loss, X, W, policy=policy({"moe": "save"}))


HEADS = {
    "checkpoint": lambda f, p: checkpoint(f, policy=p, strict=False),
    "chain": lambda f, p: lambda x, w: chain([f], x, [w], policy=p, strict=False),
    "jax.checkpoint": lambda f, p: jax.checkpoint(f, policy=p),
}


@pytest.mark.parametrize(
    "step, head",
    [("loss", "jax.checkpoint"), ("value_and_grad", "chain"), *itertools.product(("accumulate", "stages"), HEADS)],
)
def test_rule_5_check_sees_what_is_beside_a_scan_and_in_its_layers_in_each_kind_of_step(step, head):
    p, inner = policy({"h": "save", "head": "save"}), policy({"inside": "save"})

    def layer(x, w):
        x = checkpoint(lambda x: jnp.sin(tag(x * 2, "inside")), policy=inner, strict=False)(x)
        return jnp.sin(tag(x @ w, "h")), None

    def loss(ws, x):
        x, _ = scan(layer, x, ws, policy=p, strict=False)
        return HEADS[head](lambda x, w: jnp.sin(tag(x @ w, "head")), p)(x, ws[0]).sum()

    steps = {"loss": loss, "value_and_grad": jax.value_and_grad(loss), "accumulate": accumulate(loss)}
    f, x = steps.get(step, accumulate(loss, stages="stage")), X if step in ("loss", "value_and_grad") else X[None]
    with jax.set_mesh(auto_mesh(stage=2)) if step == "stages" else contextlib.nullcontext():
        check(f, jnp.stack([W] * 2), x, policy=p)
        check(f, jnp.stack([W] * 2), x, policy=inner)
        with pytest.raises(ValueError, match="has this policy"):
            check(f, jnp.stack([W] * 2), x, policy=policy({"head": "save"}))


def test_rule_5_names_are_seen_through_everything():
    @jax.custom_vjp
    def custom(x):
        return jnp.sin(x)

    def forward(x):
        return checkpoint_name(jnp.sin(x), "in_custom_vjp"), x

    custom.defvjp(forward, lambda x, ct: (ct * jnp.cos(x),))

    def f(x, w):
        x = jax.jit(lambda x: jnp.sin(tag(x, "in_jit")))(x)
        x = lax.cond(x[0, 0] > 0, lambda: jnp.sin(tag(x * 2, "in_cond")), lambda: x)
        x, _ = lax.scan(lambda x, _: (jnp.sin(tag(x @ w, "in_scan")), None), x, length=2)
        x, _ = scan(
            lambda x, _: (jnp.sin(tag(x @ w, "in_ours")), None),
            x,
            length=2,
            policy=policy({"in_ours": "save"}, resident_layers=0),
        )
        x = jax.checkpoint(lambda x: jnp.sin(tag(x * 2, "in_remat")))(x)
        x = checkpoint(lambda x: jnp.sin(tag(x * 2, "in_ours_too")), policy=policy({"in_ours_too": "save"}))(x)
        x = jax.vmap(lambda x: jnp.sin(tag(x * 2, "in_vmap")))(x)
        return custom(x)

    table = residuals(under(f, {"in_*": "offload"}), X, W)
    where = {r.names[0]: r.state for r in table if r.names}
    wanted = ["in_jit", "in_cond", "in_scan", "in_remat", "in_ours_too", "in_vmap"]
    assert all(where[name] == "offloaded" for name in wanted), where
    assert where["in_ours"] == "saved"  # the outer policy keeps it too, and an inner scan follows its own
    check(under(f, {"in_ours": "offload"}), X, W, policy=policy({"in_ours": "offload"}))
    assert where["in_custom_vjp"] == "not needed"  # that rule's backward pass reads its input


@jax.custom_vjp
def dense(x, w):
    return tag(jnp.sin(tag(x @ w, "only_in_the_body")), "act")


def dense_forward(x, w):
    h = checkpoint_name(x @ w, "only_in_the_rule")
    return tag(jnp.sin(h), "act"), (h, w)


dense.defvjp(dense_forward, lambda res, ct: ((ct * jnp.cos(res[0])) @ res[1].T, jnp.zeros_like(res[1])))


def test_rule_5_is_judged_on_the_whole_function_not_on_what_one_gradient_perturbs():
    rules = {"only_in_the_rule": "offload", "act": "save"}
    one = under(lambda x, b: jnp.sin(dense(x, W)) + b, rules)
    f = lambda x, b: lax.scan(lambda x, b: (one(x, b), None), x, b)[0]
    assert kept(lambda b: f(X, b), normal(5, (6, 4, 8))) == {
        (place, "float32", (6, 4, 8)): 1 for place in ("host", "device")
    }
    jax.make_jaxpr(jax.grad(lambda b: one(X, b).sum()))(X)  # the rule is not used here


def test_rule_5_a_name_that_a_custom_rule_replaces_is_seen_and_noted():
    f = under(lambda x, w: jnp.sin(dense(x, w)), {"only_in_the_body": "offload", "act": "save"})
    table = residuals(f, X, W)
    (note,) = [note for note in table.notes if "custom derivative" in note]
    assert "'only_in_the_body'" in note
    assert "residuals['other']" in fails(under(lambda x, w: dense(x, w), {"other": "save"}), X, W)


def test_rule_5_a_foreign_name_of_several_values_is_numbered():
    def f(x, w):
        a, b = checkpoint_name(x @ w, "context"), checkpoint_name(x @ (w + 1), "context")
        return jnp.sin(a) * jnp.cos(b)

    found = states(under(f, {"context": "save", "context.1": "offload"}), X, W)
    assert found["context.0"][0] == "saved" and found["context.1"][0] == "offloaded"
    assert states(under(f, {"context": "offload"}), X, W)["context.0"][0] == "offloaded"


@pytest.mark.claim("saved-attention")
def test_rule_5_the_results_of_one_kernel_have_one_name():
    """Keeping one result is useless if the kernel must rerun for another."""
    f = lambda x, w: jnp.sin(tag(softmax(tag(x @ w, "scores")), "context") @ w)
    rules = {"scores": "save", "context": "offload"}
    assert kept(under(f, rules), X, W) == {DEVICE: 1, HOST: 1, ("host", "float32", (4, 1)): 1}
    table = states(under(f, rules), X, W)
    assert table["context.0"] == table["context.1"] == ("offloaded", "context")
    assert states(under(lambda x, w: jax.jit(f)(x, w), rules), X, W) == table
    runs = lambda f: kernels(gradient_jaxpr(f, X, W))
    assert runs(under(f, rules)) == 1
    assert runs(under(f, rules | {"context.1": "recompute"})) == runs(under(f, {"scores": "save"})) == 2
    reference = jax.checkpoint(f, policy=saving("scores", "context"))
    assert_same_bits(*run_each([gradient(under(f, rules)), gradient(reference)], X, W))
    loop = lambda scan, f: lambda x, w: scan(lambda x, w: (f(x, w), None), x, jnp.stack([w, w + 1, w + 2]))[0]
    ours = loop(functools.partial(scan, policy=policy(rules)), f)
    assert runs(ours) == 1
    assert_same_bits(*run_each([gradient(ours), gradient(loop(lax.scan, in_a_loop(f, "scores", "context")))], X, W))


# ---------------------------------------------------------------------------------------------- 6


def body(x, w):
    x = tag(x, "layer_input")
    return jnp.sin(tag(x @ w, "fc1")), None


WS = normal(2, (6, 8, 8)) * 0.5


@pytest.mark.parametrize(
    "fields, offloaded, saved",
    [
        ({}, 5, 1),
        ({"resident_layers": 2}, 4, 2),
        ({"offload_layers": 3}, 3, 3),
        ({"offload_layers": 0.5}, 3, 3),
        ({"offload_layers": 0.99, "resident_layers": 0}, 5, 1),
        ({"offload_layers": 3, "other_layers": "recompute"}, 3, 1),
        ({"offload_layers": 3, "other_layers": "recompute", "resident_layers": 2}, 3, 2),
        ({"offload_layers": 0}, 0, 6),
        ({"offload_layers": 9}, 5, 1),
        ({"resident_layers": 7}, 0, 6),
    ],
)
def test_rule_6_layers(fields, offloaded, saved):
    f = lambda x, w: scan(body, x, w, reverse=offloaded % 2 == 1, policy=policy({"fc1": "offload"}, **fields))
    layers, others = {"offloaded": 0, "saved": 0, "recomputed": 0}, 0
    for r in residuals(f, X, WS):
        if r.names == ("fc1",):
            layers[r.state] += r.layers
            others += r.layers * (r.reason == "other_layers")
    assert layers == {"offloaded": offloaded, "saved": saved, "recomputed": 6 - offloaded - saved}
    assert others == 6 - offloaded - min(fields.get("resident_layers", 1), 6)
    assert kept_bytes(f, X, WS)[1] == (offloaded + (offloaded > 0)) * ONE  # and a padding row


def test_rule_6_checkpoint_has_no_layers_and_the_report_says_so():
    f = under(lambda x, w: body(x, w)[0], {"fc1": "offload"}, resident_layers=5, offload_layers=0)
    assert kept(f, X, W) == {HOST: 1}
    assert any("checkpoint has no layers" in note for note in residuals(f, X, W).notes)


# ---------------------------------------------------------------------------------------------- 7


@pytest.mark.claim("always-saved")
def test_rule_7_the_carry_is_never_recomputed_and_is_one_value_with_its_tag():
    f = lambda how: lambda x, w: scan(body, x, w, policy=policy({"layer_input": how}, resident_layers=0))
    assert states(f("recompute"), X, WS)["layer_input"] == ("saved", "carry")
    assert kept(f("recompute"), X, WS) == {("device", "float32", (6, 4, 8)): 1}
    assert kept(f("offload"), X, WS) == {("host", "float32", (6, 4, 8)): 1, HOST: 1}  # the last layer's, separately


def matmul(x, w):
    return jnp.sin(tag(x, "x") @ tag(w, "w"))


def sharded(x, w):
    mesh = auto_mesh(data=4)
    return jax.shard_map(matmul, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))(x, w)


def over_rows(x, w):
    """Scan over the rows of x with a constant w."""
    return lax.scan(lambda n, row: (n + 1, matmul(row, w)), 0, x)[1]


def nested_rows(x, w):
    return lax.scan(lambda n, _: (n + 1, over_rows(x, w)), 0, length=2)[1][0]


@pytest.mark.parametrize("inside", [sharded, over_rows, nested_rows, jax.checkpoint(sharded)])
@pytest.mark.parametrize("decision, place", [("recompute", "device"), ("offload", "host")])
def test_rules_7_and_8_hold_inside_shard_map_and_inner_scans(inside, decision, place):
    rules = {"x": decision, "w": decision}
    f = lambda x, w: scan(lambda x, w: (inside(x, w), None), x, w, policy=policy(rules, resident_layers=0))
    by_itself = {HOST: 1} if place == "host" else {}  # the last layer's
    assert kept(f, X, WS) == {(place, "float32", (6, 4, 8)): 1, **by_itself}  # the carry, once
    assert states(f, X, WS)["w"] == ("saved", "argument")
    g = under(inside, rules)
    moved = {HOST: 1, ("host", "float32", (8, 8)): 1}  # arguments of checkpoint that are tagged and marked
    assert kept(g, X, W) == (moved if decision == "offload" else {})


def test_rule_7_the_state_of_an_inner_scan_is_not_an_argument():
    def f(x, w):
        return lax.scan(lambda x, w: (matmul(x, w), None), x, w)[0]

    assert kept(under(f, {"x": "offload", "w": "save"}), X, WS) == {("host", "float32", (6, 4, 8)): 1}
    assert kept(under(f), X, WS) == {}


# ---------------------------------------------------------------------------------------------- 8


@pytest.mark.claim("always-saved")
def test_rule_8_weights_and_plain_arguments_are_never_moved_or_copied():
    shared = normal(5, (8,))

    def tagged_weights(x, w):
        w = tag(w, "weight")
        return jnp.sin(x @ w) * tag(shared, "scale").reshape(1, 8), None

    rules = {"weight": "offload", "scale": "offload"}
    f = lambda x, w: scan(tagged_weights, x, w, policy=policy(rules, resident_layers=0))
    assert kept(f, X, WS) == {("device", "float32", (6, 4, 8)): 1}  # the carry
    assert states(f, X, WS)["weight"] == ("saved", "argument")
    g = under(lambda x, w: jnp.sin(tag(x, "x") @ tag(w, "w")), {"x": "recompute", "w": "save"})
    assert kept(g, X, W) == {}
    assert states(g, X, W)["w"] == ("saved", "argument")


# ---------------------------------------------------------------------------------------------- 9


def test_rule_9_min_offload_bytes_judges_a_composite_whole():
    def f(x, w):
        fc1 = tag({"gate": x @ w, "up": x @ (w + 1)}, "fc1")
        return jnp.sin(fc1["gate"]) * jnp.sin(fc1["up"]) + jnp.sin(tag(x @ w, "other"))

    rules = {"fc1": "offload", "other": "offload"}
    g = under(f, rules, min_offload_bytes=2 * ONE)
    assert kept(g, X, W) == {HOST: 2, DEVICE: 1}
    assert states(g, X, W)["other"] == ("saved", "smaller than min_offload_bytes")
    assert kept(under(f, rules, min_offload_bytes=2 * ONE + 1), X, W) == {DEVICE: 3}


def test_rule_9_only_the_leaves_of_one_tag_are_one_composite():
    def f(x, w):
        for rows in (4, 2):
            x = x[:rows]
            pair = tag({"gate": x @ w, "up": x @ (w + 1)}, "fc1")
            x = jnp.sin(pair["gate"]) * jnp.sin(pair["up"])
            x = jnp.sin(tag(x @ w, "x"))
        return x

    moved = lambda least: kept(under(f, {"fc1": "offload", "x": "offload"}, min_offload_bytes=least), X, W)
    half = lambda place: (place, "float32", (2, 8))
    assert moved(ONE // 2) == {HOST: 3, half("host"): 3}
    assert moved(ONE) == {HOST: 3, half("host"): 2, half("device"): 1}
    assert moved(ONE + 1) == {HOST: 2, DEVICE: 1, half("device"): 3}  # the values named x are not a composite
    assert moved(2 * ONE + 1) == {DEVICE: 3, half("device"): 3}


def test_rule_9_a_name_that_begins_like_a_composites_is_another():
    def f(x, w):
        tags = [tag({"gate": x @ (w + i), "up": x @ (w - i)}, name) for i, name in ((1, "fc1"), (2, "fc10"))]
        return sum(jnp.sin(fc["gate"]) * jnp.sin(fc["up"]) for fc in tags)

    moved = lambda least: kept(under(f, {"fc1*": "offload"}, min_offload_bytes=least), X, W)
    assert moved(2 * ONE) == {HOST: 4}
    assert moved(2 * ONE + 1) == {DEVICE: 4}


# ---------------------------------------------------------------------------------------------- 10


def test_rule_10_the_four_states():
    def layer(x, w):
        x = tag(x, "layer_input")
        act = tag(jnp.sin(tag(x @ w, "fc1")), "act")
        return x + tag(tag(jnp.sin(act), "other") @ w, "fc2"), None

    rules = {"fc1": "offload", "act": "save", "other": "recompute", "fc2": "offload"}
    f = lambda x, w: scan(layer, x, w, policy=policy(rules, resident_layers=0))
    table = {r.names[0]: (r.state, r.layers, r.bytes) for r in residuals(f, X, WS) if r.kind != "padding"}
    states = {"layer_input": "saved", "fc1": "offloaded", "act": "saved", "other": "recomputed"}
    assert table == {name: (state, 6, 6 * ONE) for name, state in states.items()} | {"fc2": ("not needed", 0, 0)}


@pytest.mark.parametrize("what", ["a label of a scan inside", "a body that a rule replaces inside"])
def test_rule_1_a_pattern_may_match_what_an_inner_plan_has_seen(what):
    """Names that no equation has any more, where the inner function was differentiated already."""
    x, ws = normal(0, (4, 4)), normal(1, (3, 4, 4))
    sin = jax.custom_jvp(lambda x: jnp.sin(tag(x, "hidden")))
    sin.defjvp(lambda x, t: (jnp.sin(*x), jnp.cos(*x) * t[0]))
    twice = lambda x, w: (tag(jnp.sin(tag(x @ w, "context")), "context"), None)
    inner, pattern = {
        "a label of a scan inside": (lambda x: scan(twice, x, ws, policy=policy())[0], "context.0"),
        "a body that a rule replaces inside": (jax.grad(lambda x: checkpoint(sin, policy=policy())(x).sum()), "hidden"),
    }[what]
    jax.make_jaxpr(jax.grad(lambda x: checkpoint(inner, policy=policy({pattern: "save"}))(x).sum()))(x)
