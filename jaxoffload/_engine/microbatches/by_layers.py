"""Enter `accumulate`: run two microbatches beside each other if something is offloaded, else one after another.

Gradients of layers are added where they are made.
"""

import dataclasses
from typing import Any

import jax
from jax.ref import AbstractRef

from ..._errors import warn
from ..._jax import nbytes
from ..._refusals import refuse_ordered_effects
from ..._text import readable
from ..._tracing import tracing
from ..host.limit import HostPoolFull, auto_axes, host_pool_bytes
from ..host.need import Need
from ..layers.scan_primitive import with_fewer_layers
from . import interleaved
from .call import Call, Sums, microbatch_of
from .ends import ends
from .gradient import Gradient, gradient_of


def sums_by_layers(call: Call) -> Sums | None:
    """Return the sums; None where there are no layers, or one microbatch."""
    if call.microbatches == 1 or tracing().reference or jax.config.jax_disable_jit:
        return None
    gradient = gradient_of(call.jaxpr, len(call.consts), len(call.params))
    why = ""
    if gradient.reads_refs_late:
        why = "the backward pass of the loss reads or writes a jax.new_ref from outside"
    elif not gradient.scans:
        why = (
            "the loss has no scan of jaxoffload's that the gradient reaches, outside of other control flow; a lax.scan "
            "of layers under a Policy becomes one in accumulate(offload(loss))"
        )
    if why:
        warn(f"accumulate: {why}; the microbatches run one after another")
        return None
    gradient = _that_fits(gradient)
    scans, size = gradient.scans, sum(map(nbytes, call.jaxpr.in_avals[len(call.consts) : call.fixed]))
    offloads = any(scan.loops.offloads for scan in scans)
    loops = lambda scans: tuple(scan.loops for scan in scans)
    loss = interleaved.Loss(call.jaxpr, call.differentiated)
    what = interleaved.Interleaved(loss, loops(scans), loops(scans), loops(scans), call.microbatches)
    first = last = gradient
    if offloads:
        refuse_ordered_effects("accumulate", call.jaxpr)
        of = lambda end: gradient if end is scans else dataclasses.replace(gradient, scans=end)
        first, last = map(of, ends(scans, call.microbatches, size))

    # A loop cannot carry references: the loss has its own, with the values of those from outside.
    refs = [n for n, aval in enumerate(call.jaxpr.in_avals) if isinstance(aval, AbstractRef)]

    def run(*operands: Any) -> Any:
        fixed = [jax.new_ref(x) if n in refs else x for n, x in enumerate(operands[: call.fixed])]
        microbatch = lambda number: microbatch_of(operands[call.fixed :], number)
        sums = list(map(call.zero_sum, gradient.sums))
        if offloads:
            outs = interleaved.run((first, gradient, last), fixed, call.microbatches, microbatch, sums)
        else:
            outs = interleaved.run_in_turn(gradient, fixed, call.microbatches, microbatch, sums)
        return *outs, [fixed[n][...] for n in refs]

    what = what._replace(first=loops(first.scans), last=loops(last.scans), need=_need(gradient))
    outs = interleaved.bind(run, what, *(x[...] if n in refs else x for n, x in enumerate(call.operands)))
    for n, value in zip(refs, outs[len(outs) - len(refs) :], strict=True):
        call.operands[n][...] = value
    return call.sums_of(outs[: len(outs) - len(refs)])


def _need(gradient: Gradient) -> Need:
    return interleaved.need_of_microbatches([scan.loops for scan in gradient.scans], (gradient.beside_scans,))


def _that_fits(gradient: Gradient) -> Gradient:
    """Return the gradient, with fewer layers that offload where the policies say so and all together have no room.

    Raises:
      HostPoolFull: the pool cannot hold what two microbatches offload, and a policy says `on_host_full: error`.
    """
    offloading = [scan for scan in gradient.scans if scan.loops.offloads]
    if tracing().trial is not None:  # `plan` has a budget of its own
        return gradient
    if (pool := host_pool_bytes()) is None or not offloading or (need := _need(gradient).bytes()) <= pool:
        return gradient
    stacks = Need(tuple(stack for scan in offloading for stack in scan.loops.stacks))
    others = need - 2 * stacks.bytes()
    fit = next((n for n in reversed(range(stacks.most_layers())) if others + 2 * stacks.bytes(n) <= pool), None)
    text = f"two microbatches offload {readable(need)} per device; the pinned host pool holds {readable(pool)}"
    policies = (scan.loops.segments[0].layer.plan.policy for scan in offloading)
    if fit is None or any(policy.on_host_full == "error" for policy in policies):
        raise HostPoolFull("accumulate", text, need, pool, fit, auto_axes())
    instead = f"enough for {fit} layer(s) of each scan, which offload (on_host_full: save)"
    warn(f"accumulate: {text}, {instead}")
    fewer = tuple(scan._replace(loops=with_fewer_layers(scan.loops, fit)) for scan in gradient.scans)
    return dataclasses.replace(gradient, scans=fewer)
