"""The claim `placement`: collectives give devices no more than in the reference, so nothing lies on more devices."""

import re
from collections import Counter

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import ppermute_p

from ..._engine.jaxprs.walk import walk
from ..._engine.layers.loops import backward_p, loops_of
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._jax import nbytes
from ..._text import readable
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import hlo
from .._program.target import Target
from .shared import first, no_reference


def placement(target: Target) -> Found:
    """Compare the collectives with the reference's.

    By bytes, for XLA may run one on a stack in one program, and one on each of its rows in the other.
    """
    if target.device_count < 2:
        return NOT_CHECKED, "all arguments are on one device"
    if not target.has_reference:
        return NOT_CHECKED, no_reference(target)
    if any(is_staged(site.eqn) for site in walk(target.jaxpr)):
        return _exchanges(target)
    ours, reference = _bytes_by_kind(target.module), _bytes_by_kind(hlo.parse(target.fast_reference.as_text()))
    more, padding = ours - reference, padding_read(target.jaxpr)
    if wrong := [f"{kind} {readable(size)}" for kind, size in more.items() if size > padding]:
        return FAILS, f"collectives give devices more than the reference's do: {', '.join(wrong)}"
    compared = f"collectives give each device {readable(ours.total())}, the reference's {readable(reference.total())}"
    return HOLDS, f"{compared}; stacks on the host have rows that are empty, and read" if more else compared


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
