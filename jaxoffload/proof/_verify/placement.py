"""The claim `placement`: collectives give devices no more than in the reference, so nothing lies on more devices."""

from collections import Counter

from jax.extend.core import Jaxpr

from ..._engine.jaxprs.walk import walk
from ..._engine.layers.loops import backward_p, loops_of
from ..._engine.microbatches.interleaved import interleaved_p, is_staged
from ..._jax import nbytes
from ..._text import readable
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program import hlo
from .._program.target import Target
from .shared import no_reference
from .stages import exchanges


def placement(target: Target) -> Found:
    """Compare the collectives with the reference's.

    By bytes, for XLA may run one on a stack in one program, and one on each of its rows in the other.
    """
    if len(target.devices) < 2:
        return NOT_CHECKED, "all arguments are on one device"
    if not target.has_reference:
        return NOT_CHECKED, no_reference(target)
    if any(is_staged(site.eqn) for site in walk(target.jaxpr)):
        return exchanges(target)
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
