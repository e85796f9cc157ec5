"""Policy: its fields, its patterns against a slow and literal reading, and its use as JAX's own policy."""

import dataclasses
import functools
import re
from decimal import Decimal

import jax
import jax.numpy as jnp
import pytest
from autodiff import count, gradient, gradient_jaxpr, kept, offloading, saving
from common import ROOT, assert_same_bits, normal, policy, run_each
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from jaxoffload import (
    Policy,
    PolicyError,
    accumulate,
    check,
    checkpoint,
    evaluate,
    offload,
    proof,
    residuals,
    scan,
    tag,
)
from jaxoffload._megatron import MODULES
from jaxoffload._policy import matches
from jaxoffload._text import one_of

H200 = (ROOT / "machines/h200.json").read_text()
NO_FUNCTION = {
    "accumulate": accumulate,
    "check": functools.partial(check, policy=Policy()),
    "checkpoint": functools.partial(checkpoint, policy=Policy()),
    "evaluate": evaluate,
    "offload": offload,
    "plan": functools.partial(proof.plan, budget="1GiB", machine=ROOT / "machines/h200.json"),
    "predict": functools.partial(proof.predict, machine=None),
    "profile": proof.profile,
    "residuals": residuals,
    "verify": proof.verify,
}


@pytest.mark.parametrize("name", NO_FUNCTION)
def test_what_is_given_in_place_of_a_function_is_named(name):
    with pytest.raises(TypeError, match=rf"^{name}: (f|loss) must be a function, got {{'w': Array\("):
        NO_FUNCTION[name]({"w": jnp.ones(3)})


@pytest.mark.parametrize("name", ["check", "plan", "predict", "residuals", "verify"])
def test_an_argument_that_is_no_array_is_named(name):
    how = {"predict": functools.partial(proof.predict, machine=proof.Machine.from_json(H200))}
    with pytest.raises(TypeError, match=rf"^{name}: args\[1\]\['how'\] is 'mean', of type str; arguments are pytrees"):
        (NO_FUNCTION | how)[name](lambda x, how: jnp.sum(x), jnp.ones(3), {"how": "mean"})


ANY_DECISION, A_LIST, A_SIZE = "'save', 'offload' or 'recompute'", "such as ['moe_act']", "512KiB"
# Fields, the key and the value in the message, what is allowed, and the nearest value.
BAD_FIELDS = [
    ({"residuals": {"fc1": "ofload"}}, "residuals['fc1']: 'ofload' is not allowed", ANY_DECISION, "offload"),
    ({"residuals": {"fc1": True}}, "residuals['fc1']: True", ANY_DECISION, None),
    ({"residuals": {"fc1": "Save"}}, "residuals['fc1']: 'Save'", ANY_DECISION, "save"),
    ({"residuals": {"mlp": {"up": "save"}}}, "residuals['mlp']: {'up': 'save'} is not a deci", "'mlp/up' for", None),
    ({"residuals": ["fc1"]}, "residuals: ['fc1'] is not a mapping", "save, offload, recompute", None),
    ({"residuals": "ab"}, "residuals: 'ab' is not a mapping", "save, offload, recompute", None),
    ({"residuals": {("fc1", "save")}}, "residuals: {('fc1', 'save')} is not a mapping of patterns", "save", None),
    ({"residuals": [(["a"], "save")]}, "residuals[['a']]", "non-empty string", None),
    ({"residuals": {"": "save"}}, "residuals['']", "non-empty string", None),
    ({"residuals": {"!fc1": "save"}}, "residuals['!fc1']", "no '!'", None),
    ({"residuals": {"a//b": "save"}}, "residuals['a//b']", "a component is empty", None),
    ({"residuals": {"fc 1": "save"}}, "residuals['fc 1']", "cannot have ' '; '?' stands for any", None),
    ({"residuals": {"moe**/x": "save"}}, "residuals['moe**/x']", "whole components", None),
    ({"offload_modules": "moe_act"}, "offload_modules: 'moe_act' is not a list", A_LIST, None),
    ({"offload_modules": {"moe_act"}}, "offload_modules: {'moe_act'} is not a list", A_LIST, None),
    ({"offload_modules": ["moe_atc"]}, "offload_modules: 'moe_atc'", one_of(MODULES), "moe_act"),
    ({"offload_modules": [["moe_act"]]}, "offload_modules: ['moe_act'] is not", one_of(MODULES), "moe_act"),
    ({"offload_modules": ["moe_act"] * 3}, "offload_modules: 'moe_act' is given more than once", "once", None),
    ({"default": "rekompute"}, "default: 'rekompute'", ANY_DECISION, "recompute"),
    ({"dots": None}, "dots: None", ANY_DECISION, None),
    ({"min_offload_bytes": "1 Mib"}, "min_offload_bytes: '1 Mib'", A_SIZE, "1MiB"),
    ({"min_offload_bytes": "9" * 400 + "KiB"}, "min_offload_bytes: '999", A_SIZE, None),
    ({"min_offload_bytes": -1}, "min_offload_bytes: -1", "bytes >= 0", None),
    ({"min_offload_bytes": 1.5}, "min_offload_bytes: 1.5", "bytes >= 0", None),
    ({"resident_layers": -1}, "resident_layers: -1", "whole number >= 0", None),
    ({"resident_layers": True}, "resident_layers: True", "whole number >= 0", None),
    ({"offload_layers": "ALL"}, "offload_layers: 'ALL'", "fraction from 0.0 to 1.0", "all"),
    ({"offload_layers": 1.5}, "offload_layers: 1.5", "fraction from 0.0 to 1.0", None),
    ({"other_layers": "offload"}, "other_layers: 'offload'", "'save' or 'recompute'", None),
    ({"on_host_full": "eror"}, "on_host_full: 'eror'", "'error' or 'save'", "error"),
]


@pytest.mark.parametrize("fields, key_and_value, allowed, nearest", BAD_FIELDS, ids=lambda x: str(x)[:30])
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(fields, key_and_value, allowed, nearest):
    with pytest.raises(PolicyError) as error:
        Policy(**fields)
    ((key, problem),) = error.value.problems
    assert problem.startswith(f"{key}: ") and problem.startswith(key_and_value) and allowed in problem
    assert (f"the nearest is {nearest!r}" in problem) == (nearest is not None)


PAIRS = (("fc1", "offload"), ("act", "save"))


@pytest.mark.parametrize(
    "given",
    [dict(PAIRS), dict(PAIRS).items(), PAIRS, list(map(list, PAIRS))],
    ids=["mapping", "items", "tuple", "list of lists"],
)
def test_residuals_are_a_mapping_or_its_pairs(given):
    assert Policy(residuals=given) == Policy(residuals=PAIRS)


def test_a_long_value_is_not_shown_whole():
    long = "x" * 10_000
    for fields in ({"residuals": {f"a {long}": "save"}}, {"default": long}, {"offload_layers": long}):
        with pytest.raises(PolicyError) as error:
            Policy(**fields)
        assert len(str(error.value)) < 600 and "xxx..." in str(error.value)


def test_all_problems_are_raised_together():
    with pytest.raises(PolicyError) as error:
        Policy(residuals={"fc1": "x", "a//b": "save"}, dots="maybe", resident_layers=-3)
    assert len(error.value.problems) == 4


def test_a_policy_is_frozen_hashable_and_equal_by_value():
    a, b = Policy(residuals={"fc1": "save"}), Policy(residuals=(("fc1", "save"),))
    assert a == b and hash(a) == hash(b)
    assert dataclasses.replace(a, residuals={"fc1": "offload"}) != a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.dots = "save"


def test_of_patterns_given_twice_the_later_one_wins_at_its_own_place():
    p = Policy(residuals=(("a", "save"), ("*", "offload"), ("a", "recompute")))
    assert p.rules == (("*", "offload"), ("a", "recompute"))
    assert p.match("a") == ("a", "recompute")
    p = Policy(residuals=(("*", "save"), ("a", "offload"), ("*", "save")))
    assert p.match("a") == ("*", "save")


@pytest.mark.claim("megatron-names")
def test_the_page_lists_megatrons_modules():
    rows = re.findall(r"^\| `(\w+)` \| (`.*`) \|$", (ROOT / "docs/megatron.md").read_text(), re.M)
    listed = {module: tuple(re.findall(r"`([^`]+)`", patterns)) for module, patterns in rows}
    assert {module: patterns for module, patterns in listed.items() if module in MODULES} == MODULES


def test_each_of_megatrons_modules_is_known():
    p = Policy(offload_modules=tuple(MODULES))
    assert len(MODULES) == 12 and len(p.rules) == len({pattern for pattern, _ in p.rules}) == 11
    assert p.match("attn/context.1") == ("attn/context", "offload") and p.match("shared/fc1.gate")
    assert p.match("mlp/fc1") is p.match("decoder/moe/fc1") is None


@pytest.mark.parametrize("pattern", ["moe/fc1", "fc1", "moe/fc1.up", "**"])
def test_residuals_win_over_offload_modules(pattern):
    p = Policy(residuals={pattern: "save"}, offload_modules=("moe_act", "attn_norm"))
    assert p.match("moe/fc1.up") == (pattern, "save")
    assert p.match("moe/fc1.up", "layer_input") == (pattern, "save")
    assert p.reason(pattern) == pattern
    if pattern != "**":
        assert p.match("layer_input") == ("layer_input", "offload")


@pytest.mark.parametrize(
    "size, expected",
    [(0, 0), (4096, 4096), (" 17 B ", 17), ("4KiB", 4096), ("0.5GiB", 2**29), ("2MB", 2 * 10**6), ("2.01KB", 2010)],
)
def test_sizes_are_bytes_or_strings(size, expected):
    assert Policy(min_offload_bytes=size).min_offload_bytes == expected
    assert Policy().min_offload_bytes == 2**20


@pytest.mark.parametrize(
    "pattern, name, expected",
    [
        ("fc1", "moe/shared/fc1", True),
        ("fc1", "moe/fc10", False),
        ("fc1", "moe/fc1.gate", True),
        ("fc1.gate", "moe/fc1.gate", True),
        ("gate", "moe/fc1.gate", True),
        ("moe/gate", "moe/fc1.gate", True),
        ("q_proj", "MultiheadAttention.q_proj", True),
        ("scan(layers)__carry", "scan(layers)__carry", True),
        ("a?b,c:d", "a b,c:d", True),
        ("x[[]0]", "x[0]", True),
        ("FC1", "fc1", False),
        ("fc[12]", "mlp/fc2", True),
        ("layer.0/fc1", "layer.0/fc1.gate", True),
    ],
)
def test_patterns(pattern, name, expected):
    assert matches(pattern, name) == expected


def slow_reading(pattern, name):
    """The rules read literally, character by character."""

    def component(p, n):
        if not p:
            return not n
        if p[0] == "*":
            return component(p[1:], n) or (n != "" and component(p, n[1:]))
        return n != "" and p[0] in ("?", n[0]) and component(p[1:], n[1:])

    def path(ps, ns):
        if not ps:
            return not ns
        if ps[0] == "**":
            return path(ps[1:], ns) or (ns != [] and path(ps, ns[1:]))
        return ns != [] and component(ps[0], ns[0]) and path(ps[1:], ns[1:])

    ps, ns = pattern.split("/"), name.split("/")
    if "/" not in pattern and pattern != "**":
        ns = ns[-1:]
    fields = ns[-1].split(".")
    return path(ps, ns) if "." in ps[-1] else any(path(ps, [*ns[:-1], end]) for end in (fields[0], fields[-1]))


parts = st.lists(st.sampled_from(["a", "b", "ab", "fc1"]), min_size=1, max_size=3)
fields = st.sampled_from(["", ".a", ".gate"])
some_names = st.builds(lambda ps, f: "/".join(ps) + f, parts, fields)
some_patterns = st.builds(
    lambda ps, f: "/".join(ps) + f,
    st.lists(st.sampled_from(["a", "b", "a*", "*", "**", "?b", "fc1", "*c*"]), min_size=1, max_size=4),
    st.sampled_from(["", "", ".a", ".*", ".g*"]),
).filter(lambda p: not any("**" in c and c != "**" for c in p.split("/")))
decisions = st.sampled_from(["save", "offload", "recompute"])


@settings(max_examples=200, derandomize=True, deadline=None)
@given(some_patterns, some_names)
def test_patterns_as_a_slow_reading_has_them(pattern, name):
    assert matches(pattern, name) == slow_reading(pattern, name)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.dictionaries(some_patterns, decisions, max_size=5), some_names)
def test_the_last_matching_pattern_wins(residuals, name):
    wanted = None
    for pattern, decision in residuals.items():
        if slow_reading(pattern, name):
            wanted = (pattern, decision)
    assert Policy(residuals=residuals).match(name) == wanted


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.integers(0, 9), st.one_of(st.just("all"), st.integers(0, 9), st.floats(0, 1)), st.integers(0, 9))
@example(50, 0.58, 0)  # 28.999999999999996, in floating point
def test_layers_arithmetic(n, wanted, resident):
    k = Policy(offload_layers=wanted, resident_layers=resident).offloaded_layers(n)
    asked = n if wanted == "all" else int(Decimal(str(wanted)) * n) if isinstance(wanted, float) else wanted
    assert k == max(0, min(asked, n - resident))


# ------------------------------------------------------------------------------------------- as JAX's own policy


def mlp(x, w):
    return jnp.sin(tag(jnp.sin(tag(x @ w, "fc1")), "act")) @ w


X, W = normal(0, (4, 8)), normal(1, (8, 8))
RULES = {"fc1": "offload", "act": "save"}


@pytest.mark.claim("other-ways")
def test_callable_for_jax_checkpoint():
    f = jax.checkpoint(mlp, policy=policy(RULES))
    plain = jax.checkpoint(mlp, policy=saving("fc1", "act"))
    assert kept(f, X, W) == {("host", "float32", (4, 8)): 1, ("device", "float32", (4, 8)): 1}
    assert_same_bits(*run_each([gradient(f, (0, 1)), gradient(plain, (0, 1))], X, W))
    check(f, X, W, policy=policy(RULES))
    for wrong in ("FC1", "fc2"):
        with pytest.raises(PolicyError, match=rf"residuals\['{wrong}'\].*nearest is 'fc1'"):
            check(jax.checkpoint(mlp, policy=policy({wrong: "save"})), X, W, policy=policy({wrong: "save"}))


def test_callable_keeps_dots_tagged_integers_and_opt_outs():
    def f(x, w):
        h = tag(x @ w, "fc1", keep=True)
        order = tag(jnp.argsort(h), "order")
        return jnp.take_along_axis(jnp.sin(h), order, 1) @ w

    every = jax.checkpoint(f, policy=policy({"**": "offload"}))
    assert kept(every, X, W) == {("device", "float32", (4, 8)): 1, ("device", "int32", (4, 8)): 1}
    dots = jax.checkpoint(lambda x, w: jnp.sin(x @ w) @ w, policy=policy(dots="offload"))
    assert kept(dots, X, W) == {("host", "float32", (4, 8)): 1}
    assert count(gradient_jaxpr(dots, X, W, argnums=(0, 1)), "dot_general") == 6


def test_callable_around_a_plan_of_ours():
    """The policy is asked about all names of a value together."""
    inner = checkpoint(lambda x, w: jnp.sin(tag(tag(x @ w, "fc1"), "first")), policy=policy(default="save"))
    for name in ("fc1", "first"):
        outer = jax.checkpoint(inner, policy=policy({name: "offload"}))
        assert {place for place, _, shape in kept(outer, X, W) if shape == (4, 8)} == {"host"}


@pytest.mark.parametrize("least, where", [(4 * 8 * 4, "host"), (4 * 8 * 4 + 1, "device")])
def test_a_value_of_min_offload_bytes_is_large_enough(least, where):
    """As JAX's policy, in a checkpoint and in a scan."""
    rules = Policy({"fc1": "offload"}, min_offload_bytes=least, resident_layers=0)
    layer = lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None)
    one = lambda x, w: layer(x, w)[0]
    assert kept(jax.checkpoint(one, policy=rules), X, W) == {(where, "float32", (4, 8)): 1}
    assert kept(checkpoint(one, policy=rules), X, W) == {(where, "float32", (4, 8)): 1}
    stacked = jnp.stack([W] * 3)
    table = residuals(lambda x, w: scan(layer, x, w, policy=rules)[0], X, stacked)
    states = {row.state for row in table if row.names == ("fc1",) and row.layers}
    assert states == {{"host": "offloaded", "device": "saved"}[where]}


# ---- MaxText's lists ----


def maxtext_layer(x, w):
    """A layer with some of the names that MaxText gives."""
    x = checkpoint_name(x, "decoder_layer_input")
    up = checkpoint_name(jnp.tanh(x @ w), "mlpwi_0") * checkpoint_name(jnp.sin(x @ w), "mlpwi_1")
    return jnp.tanh(checkpoint_name(up @ w, "mlpwo"))


@pytest.mark.parametrize(
    "on_device, to_offload",
    [
        (["decoder_layer_input"], ["mlpwi_0", "mlpwi_1"]),
        (["decoder_layer_input", "mlpwo"], []),
        ([], ["decoder_layer_input", "mlpwo"]),
    ],
)
def test_maxtexts_lists_keep_what_its_own_policy_keeps(on_device, to_offload):
    theirs, ours = offloading(*to_offload, saved=on_device), Policy.from_maxtext(on_device, to_offload)
    args = normal(0, (4, 8)), normal(1, (8, 8))
    want = kept(jax.checkpoint(maxtext_layer, policy=theirs), *args)
    assert sum(want.values()) == len(on_device) + len(to_offload)
    assert kept(jax.checkpoint(maxtext_layer, policy=ours), *args) == want
    scanned = scan(lambda x, w: (maxtext_layer(x, w), None), args[0], jnp.stack([args[1]] * 3), policy=ours)[0]
    assert scanned.shape == (4, 8)  # the strict check: each name is in the layer


def test_maxtexts_lists_take_other_fields():
    assert Policy.from_maxtext(("a",), ("b",)) == Policy((("a", "save"), ("b", "offload")), min_offload_bytes=0)
    assert Policy.from_maxtext(["a"], min_offload_bytes="1MiB", dots="save") == Policy({"a": "save"}, dots="save")
    assert Policy.from_maxtext() == Policy(min_offload_bytes=0)


@pytest.mark.parametrize(
    "on_device, to_offload, said",
    [
        ("context", [], ["on_device: 'context' is not a list of names, such as ['context']"]),
        (None, {"a"}, ["on_device: None is not a list", "to_offload: {'a'} is not a list"]),
        (["a", "b", "c"], ["c", "a"], ["to_offload: 'c' is in on_device too", "to_offload: 'a' is in on_device too"]),
        ([3], [], ["residuals[3]: a pattern is a non-empty string"]),
    ],
)
def test_what_is_wrong_with_maxtexts_lists_is_said_at_once(on_device, to_offload, said):
    with pytest.raises(PolicyError) as caught:
        Policy.from_maxtext(on_device, to_offload)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(said) and all(map(str.startswith, lines, said)), lines
