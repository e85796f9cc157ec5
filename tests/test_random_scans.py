"""scan() on random layers: values and gradients are the reference's, bit for bit, and the table is what autodiff keeps.
Some programs run over microbatches too, through accumulate().

A program is plain data: inputs, steps that each write new registers, results, a policy. `execute` runs its steps,
under our scan or under the reference, which has nothing of ours: `lax.scan` of `jax.checkpoint` with the names that
are saved or offloaded.

Not drawn, because it is known and meant: a carry or x that comes out untouched (lax.scan passes it by; its gradient
then differs in the last bits from the reference's, whose `jax.checkpoint` hides it). The sign of a zero is not
compared.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from autodiff import in_a_loop, kept_bytes, one_by_one, saving, total
from common import assert_same_bits, exact_options, normal, policy
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from jax import lax

from jaxoffload import PolicyError, accumulate, checkpoint, residuals, scan, tag
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._engine.layers.loops import backward_p

pytestmark = pytest.mark.slow

# ------------------------------------------------------------------------------------------------- programs

FLOATS = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SIDE = 3  # every value is (SIDE, SIDE), so any two can be multiplied
INNER = 2  # layers of an inner scan


class Op(NamedTuple):
    function: Callable[..., Any]
    takes: str  # the kinds of its operands: f(loat), i(nteger), b(oolean), k(ey)
    gives: str


@jax.custom_jvp
def cube(x):
    return x * x * x


cube.defjvp(lambda primals, tangents: (cube(*primals), 3 * primals[0] * primals[0] * tangents[0]))

OPS = {
    "sin": Op(jnp.sin, "f", "f"),
    "exp": Op(lambda x: jnp.exp(x * 0.125), "f", "f"),
    "tanh": Op(jnp.tanh, "f", "f"),
    "silu": Op(jax.nn.silu, "f", "f"),
    "cube": Op(cube, "f", "f"),
    "double": Op(lambda x: x + x, "f", "f"),
    "to_f32": Op(lambda x: (x + x).astype(jnp.float32), "f", "f32"),
    "to_bf16": Op(lambda x: (x + x).astype(jnp.bfloat16), "f", "bf16"),
    "add": Op(lambda x, y: x + y.astype(x.dtype), "ff", "f"),
    "mul": Op(lambda x, y: x * y.astype(x.dtype), "ff", "f"),
    "matmul": Op(lambda x, y: x @ y.astype(x.dtype), "ff", "f"),
    "where": Op(lambda x, y, b: jnp.where(b, x, y.astype(x.dtype)), "ffb", "f"),
    "dropout": Op(lambda x, k: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x, 0), "fk", "f"),
    "positive": Op(lambda x: x[0, 0] > 0, "f", "bool"),
    "odd": Op(lambda n: n % 2 == 1, "i", "bool"),
    "not": Op(lambda b: ~b, "b", "bool"),
    "next": Op(lambda n: n + 1, "i", "int32"),
    "split": Op(lambda k: jax.random.split(k)[0], "k", "key"),
}


class Do(NamedTuple):
    op: str
    args: tuple[int, ...]  # registers


class Tag(NamedTuple):
    """Writes one register per operand; several operands are tagged as one composite."""

    name: str
    args: tuple[int, ...]
    keep: bool = False


class Block(NamedTuple):
    """Steps on their own registers, which start with two of the outer ones; writes the last register that they
    write."""

    kind: str
    args: tuple[int, int]
    predicate: int  # of cond
    steps: tuple[Any, ...]


class Program(NamedTuple):
    carry: tuple[str, ...]  # kinds
    xs: tuple[str, ...]
    consts: tuple[str, ...]
    steps: tuple[Any, ...]
    new_carry: tuple[int, ...]
    ys: tuple[int, ...]
    differentiated: tuple[int, ...]  # inputs
    loss: str  # of which results
    form: str  # of the pytrees
    length: int
    reverse: bool
    unroll: int
    rules: tuple[tuple[str, str], ...]
    fields: dict[str, Any]  # of the policy

    @property
    def inputs(self):
        return (*self.carry, *self.xs, *self.consts)


# ------------------------------------------------------------------------------------------------- running them


def execute(steps, registers, ours):
    """Return all registers after the steps."""
    registers = list(registers)
    for step in steps:
        args = [registers[i] for i in step.args]
        match step:
            case Do(op):
                registers.append(OPS[op].function(*args))
            case Tag(name, keep=keep):
                composite = args[0] if len(args) == 1 else dict(zip("xy", args, strict=True))
                registers += jax.tree.leaves(tag(composite, name, keep=keep))
            case Block(kind, predicate=predicate, steps=inner):
                f = lambda a, b: execute(inner, [a, b], ours)[-1]
                registers.append(block(kind, f, *args, registers[predicate], ours))
    return registers


def block(kind, f, a, b, predicate, ours):
    row = lambda a, _: (f(a, b).astype(a.dtype), None)
    match kind:
        case "jit":
            return jax.jit(f)(a, b)
        case "jax.checkpoint":
            return jax.checkpoint(f)(a, b)
        case "checkpoint":
            return (checkpoint(f, policy=policy(default="save")) if ours else jax.checkpoint(f))(a, b)
        case "cond":
            return lax.cond(predicate, f, lambda a, b: a.astype(jax.eval_shape(f, a, b).dtype), a, b)
        case "cond of equal branches":
            return lax.cond(predicate, lambda a, b: f(a + a, b), lambda a, b: f(-a, b), a, b)
        case "lax.scan":
            return lax.scan(row, a, length=INNER)[0]
        case "scan":
            row = lambda a, _: (jnp.sin(f(a, b)).astype(a.dtype), None)
            if ours:
                return scan(row, a, length=INNER, policy=policy(default="offload", resident_layers=0))[0]
            return lax.scan(in_a_loop(row, *every_name()), a, length=INNER)[0]


FORMS = {
    "tuple": tuple,
    "nested": lambda leaves: {"first": leaves[:1], "none": None, "rest": ((), {"all": tuple(leaves[1:])})},
}


def pytree(form, leaves):
    made = FORMS[form](list(leaves))
    assert len(jax.tree.leaves(made)) == len(leaves)
    return made


def apply(program, through, inputs):
    """Return (carry, ys)."""
    carry, xs, consts = parts(program, inputs)

    def body(carry, x):
        registers = execute(
            program.steps, [*jax.tree.leaves(carry), *jax.tree.leaves(x), *consts], through is through_ours
        )
        new = [like(kind, registers[i]) for kind, i in zip(program.carry, program.new_carry, strict=True)]
        return pytree(program.form, new), pytree(program.form, [registers[i] for i in program.ys])

    init, xs = pytree(program.form, carry), pytree(program.form, xs)
    options = {"length": program.length, "reverse": program.reverse, "unroll": program.unroll}
    return through(program, body, init, xs, **options)


def like(kind, x):
    return x.astype(FLOATS[kind]) if kind in FLOATS else x


def parts(program, inputs):
    first, last = len(program.carry), len(program.carry) + len(program.xs)
    return inputs[:first], inputs[first:last], inputs[last:]


def the_policy(program):
    return policy(dict(program.rules), **program.fields)


def through_ours(program, body, *args, **options):
    return scan(body, *args, policy=the_policy(program), strict=False, **options)


def through_reference(program, body, *args, **options):
    kept, policies = saving(*names_kept(program)), jax.checkpoint_policies
    if program.fields["dots"] != "recompute":
        kept = policies.save_from_both_policies(kept, policies.dots_with_no_batch_dims_saveable)
    return lax.scan(jax.checkpoint(body, policy=kept, prevent_cse=False), *args, **options)


def loss_of(program, through, inputs, chosen):
    """Return the loss and all results, for these values of the inputs that are differentiated."""
    out = apply(program, through, with_inputs(program, inputs, chosen))
    of = {"all": out, "carry": out[0], "ys": out[1]}[program.loss]
    return total(of) + jnp.float32(0), out


def bits(out):
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(data, out)


def values_and_gradients(program, through):
    def f(inputs):
        loss = lambda *chosen: loss_of(program, through, inputs, chosen)
        chosen = [inputs[i] for i in program.differentiated]
        (_, out), gradients = jax.value_and_grad(loss, range(len(chosen)), has_aux=True)(*chosen)
        return bits(out), gradients

    return f


MICROBATCHES = 4


def accumulated(program, through):
    """As `values_and_gradients`, over microbatches that differ in a factor and in all that is not differentiated."""
    run = accumulate if through is through_ours else one_by_one

    def f(inputs):
        def loss(chosen, factor, others):
            value, out = loss_of(program, through, [others.get(i, x) for i, x in enumerate(inputs)], chosen)
            return factor * value, out

        every = [arrays(program, 100 * number) for number in range(MICROBATCHES)]
        others = {i: jnp.stack(xs) for i, xs in enumerate(zip(*every, strict=True)) if i not in program.differentiated}
        chosen = [inputs[i] for i in program.differentiated]
        (_, out), gradients = run(loss, has_aux=True, reduction="sum")(chosen, 1.0 + jnp.arange(MICROBATCHES), others)
        return bits(out), gradients

    return f


def run_all(drawn, through, of=values_and_gradients):
    """Return the values and gradients of several programs, compiled together."""
    every = lambda inputs: [of(p, through)(i) for p, i in zip(drawn, inputs, strict=True)]
    outs = jax.jit(every, compiler_options=exact_options())(list(map(arrays, drawn)))
    return [[without_sign_of_zero(np.asarray(x)) for x in jax.tree.leaves(out)] for out in outs]


def without_sign_of_zero(x):
    """XLA simplifies 0 + x to x wherever it sees the 0, for example where it unrolls the loop that starts a sum with
    it."""
    return np.where(x == 0, np.zeros_like(x), x)


def with_inputs(program, inputs, chosen):
    inputs = list(inputs)
    for i, x in zip(program.differentiated, chosen, strict=True):
        inputs[i] = x
    return inputs


def arrays(program, first=0):
    """Return the inputs. `first`: the number of the first one, which sets its values."""

    def array(number, kind, lead):
        match kind:
            case "int32":
                return jnp.arange(1, 1 + lead[0], dtype=jnp.int32) + first if lead else jnp.int32(number)
            case "bool":
                return jnp.arange(lead[0]) % 2 == first % 3 % 2 if lead else jnp.bool(number % 2)
            case "key":
                return jax.random.split(jax.random.key(number), lead) if lead else jax.random.key(number)
        return normal(number, (*lead, SIDE, SIDE), FLOATS[kind]) * 0.5

    carry, xs, consts = parts(program, program.inputs)
    leads = [()] * len(carry) + [(program.length,)] * len(xs) + [()] * len(consts)
    return [array(first + i, kind, lead) for i, (kind, lead) in enumerate(zip(program.inputs, leads, strict=True))]


# ------------------------------------------------------------------------------------------------- names


def decision_on(program, name):
    """Return the last rule that has this name, its last component, or that without the field."""
    last = name.rpartition("/")[2]
    rules = {pattern: (number, decision) for number, (pattern, decision) in enumerate(program.rules)}
    found = [rules[p] for p in {last, last.partition(".")[0], "s/*" if "/" in name else ""} if p in rules]
    return max(found)[1] if found else None


def all_tags(steps):
    for step in steps:
        if isinstance(step, Tag):
            yield step
        elif isinstance(step, Block):
            yield from all_tags(step.steps)


def every_name():
    leaves = [name + field for name in (*NAMES, *WHOLE_NUMBERS) for field in ("", ".x", ".y")]
    return [*leaves, *(f"{name}#keep" for name in leaves)]


def field_names(step):
    return [step.name] if len(step.args) == 1 else [f"{step.name}.{key}" for key in "xy"]


def names_kept(program):
    """Return the names saved or offloaded, as `checkpoint_name` has them."""
    kept = set()
    for step in all_tags(program.steps):
        for name in field_names(step):
            kept.add(f"{name}#keep")
            if name in WHOLE_NUMBERS or (decision_on(program, name) or program.fields["default"]) != "recompute":
                kept.add(name)
    return sorted(kept)


# ------------------------------------------------------------------------------------------------- drawing them

NAMES = ("a", "b", "c", "s/a", "s/d")
WHOLE_NUMBERS = ("i", "s/j")
PATTERNS = ("a", "b", "c", "d", "c.x", "a.y", "s/*", "i")
NEXT = {"int32": "next", "bool": "not", "key": "split"}
BLOCKS = ("jit", "jax.checkpoint", "checkpoint", "cond", "cond of equal branches", "lax.scan", "scan")
KINDS = {"f": ("f32", "bf16"), "i": ("int32",), "b": ("bool",), "k": ("key",)}
DECISIONS = ("offload", "save", "recompute")


def those(kinds, letters):
    """Return the registers of these kinds, the latest first. `kinds`: of all registers so far."""
    wanted = [kind for letter in letters for kind in KINDS[letter]]
    return [i for i, kind in enumerate(kinds) if kind in wanted][::-1]


def add(kinds, step, made):
    kinds += made
    return step


@st.composite
def steps_on(draw, kinds, depth=0, blocks=BLOCKS):
    """Draw steps, which add to the registers. The last one writes a floating-point value."""
    size = draw(st.sampled_from((2, 3, 4, 1) if depth else (4, 5, 6, 7, 8, 3, 2)))
    makes = [an_op] * 4 + [a_tag] * 2 + [a_block] * (2 if depth < 2 else 0)
    made = []
    for _ in range(size - 1):
        made.append(draw(draw(st.sampled_from(makes))(kinds, depth, blocks)))
        if draw(st.booleans()) and kinds[-1] in FLOATS:
            made.append(draw(a_tag(kinds, depth, blocks, len(kinds) - 1)))
    return (*made, draw(an_op(kinds, depth, blocks, ("f", *FLOATS))))


def a_register(kinds, letter):
    """Draw the latest register most of the time, so that what is computed is used."""
    latest = those(kinds, letter)
    return st.one_of(st.just(latest[0]), st.just(latest[0]), st.sampled_from(latest))


@st.composite
def an_op(draw, kinds, depth, blocks, gives=None):
    can = lambda op: all(those(kinds, letter) for letter in op.takes)
    op = draw(st.sampled_from([o for o in OPS if can(OPS[o]) and (gives is None or OPS[o].gives in gives)]))
    args = tuple(draw(a_register(kinds, letter)) for letter in OPS[op].takes)
    return add(kinds, Do(op, args), [kinds[args[0]] if OPS[op].gives == "f" else OPS[op].gives])


@st.composite
def a_tag(draw, kinds, depth, blocks, of=None):
    """Draw a tag of one register, or of any."""
    floats, others = those(kinds, "f"), those(kinds, "ibk")
    if of is None and others and draw(st.booleans()):
        name, args = draw(st.sampled_from(WHOLE_NUMBERS)), [draw(st.sampled_from(others))]
    else:
        name, args = draw(st.sampled_from(NAMES)), [draw(st.sampled_from(floats)) if of is None else of]
        if draw(st.integers(0, 9)) == 9:
            args.append(draw(st.sampled_from(floats)))
    return add(kinds, Tag(name, tuple(args), draw(st.integers(0, 9)) == 9), [kinds[i] for i in args])


@st.composite
def a_block(draw, kinds, depth, blocks):
    predicates = those(kinds, "b")
    kind = draw(st.sampled_from([b for b in blocks if predicates or not b.startswith("cond")]))
    args = (draw(st.sampled_from(those(kinds, "f"))), draw(st.sampled_from(range(len(kinds)))))
    predicate = draw(st.sampled_from(predicates)) if kind.startswith("cond") else 0
    inside = [kinds[i] for i in args]
    # In an inner scan of ours, which has its own policy, names must not share a result of a cond.
    blocks = [b for b in blocks if not b.startswith("cond")] if kind == "scan" else blocks
    step = Block(kind, args, predicate, draw(steps_on(inside, depth + 1, blocks)))
    return add(kinds, step, [kinds[args[0]] if kind.endswith("scan") else inside[-1]])


@st.composite
def policies(draw):
    """Draw rules and the other fields. What comes first is drawn most, and is what a failure shrinks to."""
    rules = draw(st.lists(st.tuples(st.sampled_from(PATTERNS), st.sampled_from(DECISIONS)), max_size=5))
    fields = {
        "default": draw(st.sampled_from(("offload", *DECISIONS))),
        "dots": draw(st.sampled_from(("recompute", "recompute", "offload", "save"))),
        "resident_layers": draw(st.sampled_from((0, 1, 0, 1, 2, 3))),
        "offload_layers": draw(st.sampled_from((*["all"] * 6, 1, 2, 0.5, 0.75, 0))),
        "other_layers": draw(st.sampled_from(("recompute", "save"))),
    }
    return tuple(dict(rules).items()), fields


@st.composite
def programs(draw):
    length = draw(st.sampled_from((3, 2, 5, 4, 3, 2, 5, 4, 1, 0)))
    rules, fields = draw(policies())
    some = lambda kinds, most: tuple(draw(st.lists(st.sampled_from(kinds), max_size=most)))
    any_kind = ("f32", "f32", "bf16", "bool", "key", "int32")
    carry, xs = (draw(st.sampled_from(("f32", "bf16"))), *some(any_kind, 3)), some(any_kind, 3)
    consts = some(("f32", "f32", "bf16", "key"), 2)
    inputs = (*carry, *xs, *consts)
    frozen = draw(st.sets(st.sampled_from(range(len(inputs))), max_size=3))
    kinds = [*inputs]
    steps = draw(steps_on(kinds))
    # lax.scan turns a carry that comes out unchanged into a constant.
    steps += tuple(add(kinds, Do(NEXT[k], (i,)), [k]) for i, k in enumerate(carry) if k in NEXT)
    made = lambda letters: [i for i in those(kinds, letters) if i >= len(inputs)]
    floats = made("f")
    alike = lambda kind: made(next(letter for letter, of in KINDS.items() if kind in of))
    return Program(
        carry,
        xs,
        consts,
        steps,
        new_carry=(floats[0], *(draw(st.sampled_from(alike(k))) for k in carry[1:])),
        ys=tuple(draw(st.lists(st.sampled_from(floats + those(kinds, "ibk")), max_size=3))),
        differentiated=tuple(i for i, kind in enumerate(inputs) if kind in FLOATS and i not in frozen) or (0,),
        loss=draw(st.sampled_from(("all", "carry", "ys"))),
        form=draw(st.sampled_from(sorted(FORMS, reverse=True))),
        length=length,
        reverse=draw(st.booleans()),
        unroll=draw(st.sampled_from((1, 2))),
        rules=rules,
        fields=fields,
    )


# ------------------------------------------------------------------------------------------------- the test


def refused(program):
    """Return if names of one value, or of one result of a cond, have different decisions."""
    try:
        jax.eval_shape(values_and_gradients(program, through_ours), arrays(program))
    except PolicyError as error:
        decisions = {word for word in ("save", "offload", "recompute") if f" is {word} by " in str(error)}
        assert len(decisions) > 1, error
        return True
    return False


def check_bytes(program):
    inputs = arrays(program)
    f = lambda *chosen: apply(program, through_ours, with_inputs(program, inputs, chosen))
    chosen = [inputs[i] for i in program.differentiated]
    table = residuals(f, *chosen)
    assert (table.device_bytes, table.host_bytes) == kept_bytes(f, *chosen)
    assert not [row for row in table if (row.state, row.decision) == ("saved", "offload")]  # `verify`: a fault


def reaches_layers(program):
    """Return if the gradient has a backward pass of layers: some results are keys, and some inputs are read nowhere."""
    jaxpr = jax.make_jaxpr(values_and_gradients(program, through_ours))(arrays(program))
    return any(site.eqn.primitive is backward_p for site in walk(jaxpr))


EXAMPLES = int(os.environ.get("EXAMPLES", 32))  # programs; `make test-long` sets it
PARTS, A_BATCH = 4, 6  # on average


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore:jaxoffload. (dots|default)")
def test_random_scans(part):
    @seed(part)
    @settings(
        max_examples=-(-EXAMPLES // PARTS // A_BATCH),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(programs(), min_size=1, max_size=2 * A_BATCH - 1), st.sampled_from((0, 0, 1)))
    def check(drawn, accumulating):
        sound = []
        for program in drawn:
            note(program)
            if not refused(program):
                check_bytes(program)
                sound.append(program)
        for program, got, want in zip(
            sound, run_all(sound, through_ours), run_all(sound, through_reference), strict=True
        ):
            note(f"results of {program}")
            assert_same_bits(got, want)
        for program in [program for program in sound if program.length][:accumulating]:
            note(f"accumulated: {program}")
            unreached = contextlib.nullcontext() if reaches_layers(program) else pytest.warns(match="gradient reaches")
            with unreached:
                (got,) = run_all([program], through_ours, accumulated)
            (want,) = run_all([program], through_reference, accumulated)
            assert_same_bits(got, want)

    check()
