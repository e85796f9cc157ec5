"""The seven checks of `verify`, each a function of its subject.

The reference is the function's twin (`_twin`): plain `lax.scan` and `jax.checkpoint` that keep the same values on the
device. What a check cannot know it calls "not checked", and says why.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .._memory import readable
from .._residuals import EMPTY, OFFLOADED, RECOMPUTED, Residuals, residuals
from .._twin import twin
from .._xla import compiler_options
from ._program import Instruction, collectives, instructions, kernels_on_host_memory, out_of_range, products
from ._subject import INPUTS, Subject, compiled, crossings, exact_options
from ._trace import traced

HOLDS: Final = "holds"
FAILS: Final = "fails"
NOT_CHECKED: Final = "not checked"
Verdict = Literal["holds", "fails", "not checked"]
NO_TWIN = "nothing in the function is jaxoffload's, so it has no twin"


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim. `said`: what was compared, where it fails and by how much, or why it was not checked."""

    claim: str
    verdict: Verdict
    said: str

    def __str__(self) -> str:
        return f"{self.verdict:11}  {self.claim}: {self.said}"


# ------------------------------------------------------------------------------------------------------- 1


def gradients(subject: Subject) -> Check:
    claim = "gradients"
    if not subject.has_twin:
        return Check(claim, NOT_CHECKED, NO_TWIN)
    other = twin(subject.run)
    if crossing := list(crossings(jax.make_jaxpr(other)(*subject.args))):
        return Check(claim, NOT_CHECKED, f"not jaxoffload moves {len(crossing)} value(s) to the host, in the twin too")
    program = compiled(other, subject.arrays, exact_options())
    if (why := _too_large(program)) is not None:
        return Check(claim, NOT_CHECKED, why)
    mine = _on_host(subject.program(*subject.arrays))
    results = len(jax.tree.leaves(mine))
    if differ := list(_differences(mine, _on_host(program(*subject.arrays)))):
        return Check(claim, FAILS, f"{len(differ)} of {results} results differ: {'; '.join(differ[:3])}")
    return Check(claim, HOLDS, f"{results} results are the twin's, bit for bit")


def _on_host(tree: Any) -> Any:
    """As numpy arrays; of an array that other processes hold too, this one's shards."""

    def numbers(x: Any) -> np.ndarray:
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(x) if x.is_fully_addressable else np.stack([np.asarray(s.data) for s in x.addressable_shards])

    return jax.tree.map(numbers, tree)


def _differences(mine: Any, others: Any) -> Iterator[str]:
    named = zip(jax.tree_util.tree_leaves_with_path(mine), jax.tree.leaves(others), strict=True)
    for (path, a), b in named:
        if a.tobytes() != b.tobytes():
            apart = np.atleast_1d(a != b)
            wide = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(np.int64)
            by = np.max(np.abs(np.atleast_1d(wide(a) - wide(b)))[apart], initial=0)
            yield f"{jax.tree_util.keystr(path)}: {int(apart.sum())} of {a.size} values, by up to {by:.3g}"


def _too_large(program: Any) -> str | None:
    """Why the device cannot run it, if it cannot."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    plan = program.memory_analysis()
    if not limit or plan is None:
        return None
    need = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    if need <= limit:
        return None
    return f"the twin needs {readable(need)} of a device's {readable(limit)}; verify fewer layers"


# ------------------------------------------------------------------------------------------------------- 2


def conservation(subject: Subject) -> Check:
    claim = "conservation"
    if not subject.has_twin:
        return Check(claim, NOT_CHECKED, NO_TWIN)
    if subject.loss is None:
        return Check(claim, NOT_CHECKED, "a step's residuals are inside of it; verify its loss")
    mine, others = (residuals(loss, *subject.args) for loss in (subject.loss, twin(subject.loss)))
    freed, held = others.device_bytes - mine.device_bytes, _held(mine)
    how = f"{readable(freed)} less than the twin's on the device, {readable(held)} on the host"
    if freed != held:
        return Check(claim, FAILS, f"by the jaxpr {how}: {freed - held:+,} bytes")
    return _freed(subject, mine, f"by the jaxpr {how}")


def _held(table: Residuals) -> int:
    """Bytes on the host, and of what layers compute again because they do not offload it; no rows that stay empty."""
    instead = lambda row: row.state == OFFLOADED or (row.state == RECOMPUTED and row.reason == "other_layers")
    return sum(row.bytes for row in table if instead(row) and row.reason != EMPTY)


def _freed(subject: Subject, table: Residuals, said: str) -> Check:
    """As the compiler planned it: what the layer in flight holds is on the device."""
    claim = "conservation"
    if jax.default_backend() != "gpu":
        return Check(claim, HOLDS, f"{said}; not by the compiler's plan, for this backend has no host memory apart")
    options = compiler_options()
    plans = [compiled(run, subject.args, options).memory_analysis() for run in (subject.run, twin(subject.run))]
    rows = [row for row in table if row.state == OFFLOADED and row.reason != EMPTY]
    moved = sum(row.bytes - row.bytes_per_layer * (row.layers > 1) for row in rows) / max(1, len(subject.devices))
    freed = plans[1].temp_size_in_bytes - plans[0].temp_size_in_bytes
    verdict: Verdict = HOLDS if freed > 0.985 * moved - 2**21 else FAILS
    return Check(claim, verdict, f"{said}; planned {readable(freed)} less, predicted {readable(int(moved))} (1.5 %)")


# ------------------------------------------------------------------------------------------------------- 3


def moves(subject: Subject) -> Check:
    claim = "moves"
    wrong = []
    for crossing in subject.crossings:
        source = crossing.source
        if source.name is None and not crossing.named and (subject.plans.plans or source.where in INPUTS):
            wrong.append(f"{source.where} {crossing.aval.str_short()}, which nobody named")
        elif source.name is not None and source.name.decision != "offload":
            row = subject.plans.rows.get(str(source.name))
            names = ", ".join(row.names) if row else str(source.name)
            wrong.append(f"{names or 'a matrix product'}, which is marked {source.name.decision}")
    if wrong:
        return Check(claim, FAILS, f"to the host go {'; '.join(dict.fromkeys(wrong))}")
    count = len(subject.crossings)
    marked = "are marked offload" if subject.plans.plans else "have a name, or are results of equations"
    return Check(claim, HOLDS, f"the {count} values that go to the host {marked}" if count else "nothing does")


# ------------------------------------------------------------------------------------------------------- 4


def producers(subject: Subject) -> Check:
    claim = "producers"
    if not subject.plans.plans:
        return Check(claim, NOT_CHECKED, "nothing in the function is jaxoffload's: what it means to keep is not known")
    again = []
    for name, row in subject.plans.rows.items():
        layers = subject.plans.recomputed[name][0]
        is_routing = row.names and not jnp.issubdtype(row.dtype, jnp.inexact)
        if layers and (row.decision != "recompute" or is_routing):
            again.append(f"{', '.join(row.names) or 'a matrix product'} ({row.decision}) in {layers} layer(s)")
    if again:
        return Check(claim, FAILS, f"computed again: {'; '.join(dict.fromkeys(again))}")
    said = "by the jaxpr none is computed again"
    if jax.default_backend() != "gpu":
        return Check(claim, HOLDS, f"{said}; not by the compiled program, which is a GPU's")
    often, expected = products(_lines(subject)), traced_products(subject.jaxpr)
    verdict: Verdict = HOLDS if often <= expected else FAILS
    return Check(claim, verdict, f"{said}; {often} matrix products run where {expected} were traced")


_PRODUCTS = ("dot_general", "ragged_dot_general", "ragged_dot")


def traced_products(jaxpr: Jaxpr, turns: int = 1) -> int:
    """How often a jaxpr's matrix products run, in all."""
    total = 0
    for eqn in jaxpr.eqns:
        total += turns * (eqn.primitive.name in _PRODUCTS)
        for inside, body in _inside(eqn):
            total += traced_products(body, turns * inside)
    return total


def _inside(eqn: JaxprEqn) -> Iterator[tuple[int, Jaxpr]]:
    """How often each nested jaxpr runs, where that is known."""
    for value in eqn.params.values():
        for body in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(body, Jaxpr):
                yield eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1, body


# ------------------------------------------------------------------------------------------------------- 5, 6


def _lines(subject: Subject) -> list[Instruction]:
    return list(instructions(_fast(subject).as_text()))


def _fast(subject: Subject) -> Any:
    """The program as a user runs it."""
    return compiled(subject.run, subject.arrays, compiler_options())


def copies(subject: Subject) -> Check:
    claim = "copies"
    if jax.default_backend() != "gpu":
        return Check(claim, NOT_CHECKED, "needs an NVIDIA GPU: it is what XLA compiles for one")
    program = _fast(subject)
    lines = list(instructions(program.as_text()))
    wrong = [f"{line.opcode} {line.name} touches host memory" for line in kernels_on_host_memory(lines)]
    wrong += [f"{line.name} copies out of range" for line in out_of_range(lines)]
    if count := sum(line.opcode.endswith("-start") and line.on_host for line in lines):
        wrong += [f"{n} copies run on {stream}, which computes" for stream, n in _in_the_way(program, subject.arrays)]
    if wrong:
        return Check(claim, FAILS, "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    said = f"{count} asynchronous copies, all in range and on streams of their own" if count else "no copies"
    return Check(claim, HOLDS, f"{said}, and nothing else touches host memory")


def _in_the_way(program: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, int]]:
    """Streams of a device that both compute and copy to or from the host, and how many copies each makes in a run."""
    jax.block_until_ready(program(*args))
    events = next(iter(traced(lambda: jax.block_until_ready(program(*args))).values()))
    computing = {e.stream for e in events if not e.name.startswith("Memcpy") and not e.name.startswith("Memset")}
    yield from Counter(e.stream for e in events if e.is_host_copy and e.stream in computing).items()


def placement(subject: Subject) -> Check:
    claim = "placement"
    if len(subject.devices) < 2:
        return Check(claim, NOT_CHECKED, "all is on one device")
    if not subject.has_twin:
        return Check(claim, NOT_CHECKED, NO_TWIN)
    mine, others = (
        collectives(list(instructions(compiled(run, subject.args, exact_options()).as_text())))
        for run in (subject.run, twin(subject.run))
    )
    if more := mine - others:
        said = ", ".join(f"{count} {kind}" for kind, count in more.items())
        return Check(claim, FAILS, f"more collectives than the twin has: {said}")
    return Check(claim, HOLDS, f"{mine.total()} collectives, the twin has {others.total()}")


# ------------------------------------------------------------------------------------------------------- 7


def repeats(subject: Subject, repeats: int) -> Check:
    claim = "repeats"
    again = lambda: _on_host(subject.program(*subject.arrays))
    first, held = again(), []
    for number in range(1, repeats):
        if differ := list(_differences(again(), first)):
            return Check(claim, FAILS, f"run {number + 1} differs from the first: {'; '.join(differ[:3])}")
        held.append(_bytes_in_use())
    if len(held) > 1 and held[-1] > held[0]:
        return Check(claim, FAILS, f"{readable(held[-1] - held[0])} more are in use after {repeats - 2} more run(s)")
    return Check(claim, HOLDS, f"{repeats} runs are equal, and {readable(held[-1])} are in use after each")


def _bytes_in_use() -> int:
    """On the devices, where they tell; else of arrays that somebody holds."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_in_use" in s for s in stats):
        return sum(s["bytes_in_use"] for s in stats)
    return sum(array.nbytes for array in jax.live_arrays())
