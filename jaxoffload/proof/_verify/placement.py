"""The claim `placement`: no more by collectives than the reference, and no larger shard of a residual on any device."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var
from jax.extend.core.primitives import ppermute_p

from ..._compiler_options import compiler_options
from ..._engine.host.slow_copies import untold
from ..._engine.jaxprs.source import source_of
from ..._engine.jaxprs.walk import walk
from ..._engine.layers.loops import backward_p, loops_of
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._jax import DEVICE, nbytes, on_host
from ..._text import first, readable
from ..._tracing import as_reference
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import hlo
from .._program.target import Target


def placement(target: Target) -> Found:
    """Compare collectives and shards with the reference's."""
    if target.device_count < 2:
        return NOT_CHECKED, "all arguments are on one device"
    if target.no_reference:
        return NOT_CHECKED, target.no_reference
    if any(is_staged(site.eqn) for site in walk(target.jaxpr)):
        return _exchanges(target)
    more, compared = _by_collectives(target)
    larger, shards = _by_shards(target)
    wrong = [*more, *larger]
    return (FAILS, first(wrong, "; ")) if wrong else (HOLDS, "; ".join(filter(None, (compared, shards))))


def _by_collectives(target: Target) -> tuple[list[str], str]:
    """Return what is wrong with the collectives, and what was compared.

    Bytes are, for XLA may run one on a stack in one program, and one on each of its rows in the other.
    """
    reference_program = target.compiled(compiler_options, reference=True)
    ours, reference = map(_bytes_by_kind, (target.module, hlo.parse(reference_program.as_text())))
    more, padding = ours - reference, padding_read(target.jaxpr)
    if wrong := [f"{kind} {readable(size)}" for kind, size in more.items() if size > padding]:
        return [f"collectives give devices more than the reference's do: {', '.join(wrong)}"], ""
    compared = f"collectives give each device {readable(ours.total())}, the reference's {readable(reference.total())}"
    return [], f"{compared}; stacks on the host have rows that are empty, and read" if more else compared


def _bytes_by_kind(module: hlo.Module) -> Counter[str]:
    sizes = Counter[str]()
    for (kind, shape), count in hlo.collectives(module).items():
        sizes[kind] += count * hlo.nbytes(shape)
    return sizes


def padding_read(jaxpr: Jaxpr) -> int:
    """Return the bytes of the padding rows that our backward loops read from host stacks: one per stack and pass."""
    sites = [site for site in walk(jaxpr) if site.eqn.primitive in (backward_p, interleaved_p)]
    segments = lambda eqn: (segment for loops in loops_of(eqn) for segment in loops.segments if segment.copies)
    rows = lambda eqn: (aval for s in segments(eqn) for aval in s.layout.split(s.layer.forward.out_avals).host)
    return sum(s.runs * s.eqn.params.get("microbatches", 1) * sum(map(nbytes, rows(s.eqn))) for s in sites)


def _by_shards(target: Target) -> tuple[list[str], str]:
    """Return residuals whose shards are larger than in the reference, and what was compared."""
    if target.loss is None:
        return [], ""
    ours, reference = (_shard_bytes(loss, target.args) for loss in (target.loss, as_reference(target.loss)))
    larger = [
        f"each device keeps {readable(size)} of a layer's {name}, the reference's {readable(reference.get(name, 0))}"
        for name, size in sorted(ours.items())
        if size > reference.get(name, 0)
    ]
    return larger, f"no device keeps a larger shard of any of {len(ours)} residuals"


def _shard_bytes(loss: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """Return, for each named residual, the bytes that a device keeps of one layer, where XLA divides it."""
    leaves = lambda *args: jax.tree.leaves(jax.vjp(loss, *args)[1])
    jaxpr = jax.make_jaxpr(leaves)(*args)
    sources = {i: source_of(jaxpr, var) for i, var in enumerate(jaxpr.outvars) if isinstance(var, Var)}
    named = {i: source for i, source in sources.items() if source.name and source.layers + source.empty}

    def kept(*args: Any) -> list[jax.Array]:
        residuals = leaves(*args)
        to_device = lambda x: jax.device_put(x, DEVICE) if on_host(jax.typeof(x)) else x
        return [to_device(residuals[i]) for i in named]

    with untold():
        shardings = jax.jit(kept, compiler_options=compiler_options()).lower(*args).compile().output_shardings
    sizes: dict[str, int] = {}
    for source, sharding, x in zip(named.values(), shardings, jax.eval_shape(kept, *args), strict=True):
        assert source.name
        name = ", ".join(n.text for n in source.name.names) or "matmuls"
        shard = nbytes(jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)) // (source.layers + source.empty)
        sizes[name] = max(shard, sizes.get(name, 0))
    return sizes


# What XLA inserts for a layer itself cannot cross stages: their axis is manual there.
EXCHANGE = re.compile(r"/jaxoffload\.tick/shard_map/ppermute$")
MOVED = re.compile(r"/jaxoffload\.tick/(\([^()]*\b)?(shard_map|optimization_barrier)(:|\)|$)")


def _exchanges(target: Target) -> Found:
    """Check that XLA runs no more exchanges of stages than were traced, and moves nothing else between them."""
    module = target.module
    moved = hlo.collectives(module, lambda line: bool(MOVED.search(line.op_name)))
    sent = hlo.collectives(module, lambda line: bool(EXCHANGE.search(line.op_name))).total()
    asked = sum(site.runs * len(site.eqn.outvars) for site in walk(target.jaxpr) if site.eqn.primitive is ppermute_p)
    if sent > asked:
        return FAILS, f"{sent} arrays are sent to neighbours; the traced step asks for {asked}"
    if moved:
        listed = first([f"{count} {kind} of {shape}" for (kind, shape), count in moved.items()])
        advice = "shard the xs over the axis; for virtual stages store them in groups: docs/stages.md"
        return FAILS, f"what stages hold moves between them in each step: {listed}; {advice}"
    if not sent:
        return NOT_CHECKED, "the compiled program does not say which collectives are exchanges of stages"
    asks = f"{sent} arrays are sent to neighbours, as the traced step asks"
    return HOLDS, f"{asks}; nothing that stages hold moves between them"
