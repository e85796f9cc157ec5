"""The plans of a gradient: which of them decide, which only run again, and what other checkpoints stand around them."""

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core.primitives import name_p, remat_p

from ..._engine.decide.plan import Plan
from ..._engine.jaxprs.walk import Site, walk
from ..._engine.layers.layer import plan_of
from ..._engine.layers.loops import backward_p, bodies_of_gradient, forward_p, is_ours, loops_of
from ..._jax import INTERLEAVED, nbytes


class Plans:
    """The outermost plans of a gradient.

    Attributes:
      plans: in the order of the layers.
      rows: their rows, by the name that the plan wrote.
      recomputed: for each such name, what the backward pass recomputes of it.
      kept: a checkpoint keeps what a scan in it keeps.
      overlap: a plan is nested in another, or in another's loop.
      rerun: a foreign checkpoint reruns a plan.
      policies: those under which foreign checkpoints keep something.
    """

    def __init__(self, jaxpr: Jaxpr, reruns_too: bool = True):
        """`reruns_too`: with the plans that the backward pass runs again for checkpoints other than theirs."""
        sites = list(walk(jaxpr, bodies_of_gradient))
        run_again = (site.eqn for site in sites if site.eqn.primitive is forward_p and _checkpoints(site.enclosing))
        again = {plan for eqn in run_again for plan in plans_of(eqn)}
        every = [_met(site, again) for site in sites]
        met = [m for m in every if reruns_too or m.checkpoints[:1] != [None]]
        plans = [(plan, m.owner, m.loops) for m in met for plan in plans_of(m.site.eqn)]
        # A nested plan decides when the backward pass runs it again, not what that finds.
        nested = {plan for plan, owner, _ in plans if owner and plan != owner}
        outermost = dict.fromkeys(plan for plan, owner, _ in plans if owner in (None, plan))
        # The backward pass meets the last segment of a function first.
        self.plans = [plan for plan in reversed(outermost) if plan not in nested]
        self.rows = {row.plan_name: row for plan in self.plans for row in plan.rows}
        self.recomputed = _recomputed(met)
        self.kept = any(m.is_kept for m in met)
        self.overlap = bool(nested) or any(loops and plan not in loops for plan, _, loops in plans)
        self.rerun = any(None in m.checkpoints and plans_of(m.site.eqn) for m in every)
        keeps = (m for m in met if _is_foreign(m.site.eqn) and m.site.eqn.params["policy"] is not None)
        self.policies = {m.site.eqn.params["policy"] for m in keeps if m.owner is None and not m.loops}


class _Met(NamedTuple):
    """An equation of a gradient, and what is around it.

    Around the backward loop of a scan that a checkpoint keeps, that checkpoint does not count.
    """

    site: Site
    checkpoints: list[Plan | None]  # outermost first
    loops: list[Plan]  # of the innermost loop of ours
    is_kept: bool  # whether it belongs to a scan that a checkpoint around it keeps

    @property
    def owner(self) -> Plan | None:
        """The plan of the outermost checkpoint that has one."""
        return next(filter(None, self.checkpoints), None)


def _met(site: Site, again: Collection[Plan]) -> _Met:
    """`again`: the plans of scans that run again inside a checkpoint."""
    at = [*site.enclosing, site.eqn]
    kept = (n for n, e in enumerate(at) if e.primitive is backward_p and not any(p in again for p in plans_of(e)))
    outside, inside = site.enclosing[: (first := next(kept, 0))], site.enclosing[first:]
    loops = [plans_of(e) for e in inside if is_ours(e)]
    return _Met(site, _checkpoints(inside), loops[-1] if loops else [], bool(_checkpoints(outside)))


def _checkpoints(enclosing: Iterable[JaxprEqn]) -> list[Plan | None]:
    """Return the plans of the checkpoints around an equation that the backward pass runs; None for one without."""
    return [_checkpoint_plan(e) for e in enclosing if _is_foreign(e) or _checkpoint_plan(e)]


def plans_of(eqn: JaxprEqn) -> list[Plan]:
    """Return the plans that an equation runs: that of a checkpoint, or those of a loop's layers."""
    if loops := loops_of(eqn):
        ends = [*eqn.params["first"], *eqn.params["last"]] if eqn.primitive.name == INTERLEAVED else []
        return list(dict.fromkeys(segment.layer.plan for each in [*loops, *ends] for segment in each.segments))
    return [plan] if (plan := _checkpoint_plan(eqn)) else []


def _checkpoint_plan(eqn: JaxprEqn) -> Plan | None:
    """Return the plan of a checkpoint that the backward pass runs; None for a first run, or without a plan."""
    first_run = eqn.primitive is remat_p and not eqn.params["differentiated"]
    return None if first_run else plan_of(eqn.params.get("policy"))


def _is_foreign(eqn: JaxprEqn) -> bool:
    """Return if an equation is a checkpoint without a plan that the backward pass runs."""
    return eqn.primitive is remat_p and eqn.params["differentiated"] and plan_of(eqn.params["policy"]) is None


class Recomputed(NamedTuple):
    """In how many layers the backward pass recomputes a value, bytes in all, and over how many devices a `shard_map`
    divides these."""

    layers: int = 0
    bytes: int = 0
    devices: int = 1


def _recomputed(met: Iterable[_Met]) -> dict[str, Recomputed]:
    recomputed: dict[str, Recomputed] = defaultdict(Recomputed)
    for m in met:
        site, owner = m.site, m.owner
        if owner and site.eqn.primitive is name_p and (name := site.eqn.params["name"]) in owner.plan_names:
            layers, size, _ = recomputed[name]
            each = site.devices * nbytes(site.eqn.outvars[0].aval)
            recomputed[name] = Recomputed(layers + site.runs, size + site.runs * each, site.devices)
    return recomputed
