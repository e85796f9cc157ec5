"""scan(): `jax.lax.scan` whose residuals a `Policy` chooses, layer by layer.

`lax.scan` itself traces the body, with its checks, promotions and errors. The traced body then runs as `checkpoint`
does, in one `lax.scan` for each group of neighbouring layers that treat their residuals alike: the first offload, the
last stay on the device.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, jaxpr_as_fun

from ._checkpoint import bind, for_all_inputs, host_bytes
from ._memory import host_pool_bytes, layers_that_fit
from ._plan import Layers
from ._policy import Policy


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    *,
    policy: Policy,
    strict: bool = True,
) -> tuple[Any, Any]:
    """`jax.lax.scan` under a `Policy`: a scan over layers with each named residual saved, offloaded or recomputed.

    Values, shapes, dtypes and errors are those of `lax.scan(jax.checkpoint(f), init, xs, length, reverse, unroll)`.

    Args:
      f: `(carry, x) -> (carry, y)`; names its residuals with `tag` or `checkpoint_name`.
      init, xs, length, reverse, unroll: as for `lax.scan`. Layers count in the order in which they run.
      policy: decides on the named values of `f`. The carry is never computed again, xs and closed-over arrays (the
        weights) are never moved or copied.
      strict: a pattern that matches no value of `f` is an error, raised when the scan is differentiated. Pass False
        where several scans share one policy, and judge them together with `check`.

    Raises (when differentiated, before anything is compiled):
      PolicyError: a pattern matches nothing, or two names of one value have different decisions.
      MemoryError: the pinned host pool is smaller than the need, and the policy says `on_host_full: error`.
      NotImplementedError: offloading here would give wrong gradients; it says what to change.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"scan: policy must be a jaxoffload.Policy, got {policy!r}")
    if jax.config.jax_disable_jit:  # then lax.scan is a Python loop, and nothing is placed
        return lax.scan(f, init, xs, length=length, reverse=reverse, unroll=unroll)
    body, operands, tree = _trace(f, init, xs, length, reverse, unroll)
    outs = _run(body, operands, _groups(body, policy), reverse, unroll, policy, strict)
    return jax.tree.unflatten(tree, outs)


class _Body(NamedTuple):
    """A scan's body: (constants, carry, xs) -> (carry, ys), all flat; how many of each; the number of layers."""

    jaxpr: Jaxpr
    consts: int
    carry: int
    layers: int

    @property
    def roles(self) -> tuple[str, ...]:
        xs = len(self.jaxpr.invars) - self.consts - self.carry
        return ("weight",) * (len(self.jaxpr.consts) + self.consts) + ("carry",) * self.carry + ("weight",) * xs


class _Group(NamedTuple):
    """Neighbouring layers, in the order in which they run, that treat their residuals alike."""

    start: int
    stop: int
    layers: Layers


def _trace(f, init, xs, length, reverse, unroll) -> tuple[_Body, list[Any], Any]:
    """The body as lax.scan traces it, the operands as it promotes them, and the structure of its result."""

    def lax_scan(init: Any, xs: Any) -> tuple[Any, Any]:
        return lax.scan(f, init, xs, length=length, reverse=reverse, unroll=unroll)

    jaxpr, shape = jax.make_jaxpr(lax_scan, return_shape=True)(init, xs)
    at = max(i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is lax.scan_p)
    eqn = jaxpr.eqns[at]
    before = jaxpr.replace(
        eqns=jaxpr.eqns[:at], outvars=eqn.invars, debug_info=jaxpr.debug_info._replace(result_paths=None)
    )
    operands = jaxpr_as_fun(before)(*jax.tree.leaves((init, xs)))
    body, carry = eqn.params["jaxpr"], len(jax.tree.leaves(init))
    consts = len(body.invars) - carry - len(jax.tree.leaves(xs))
    return _Body(body, consts, carry, eqn.params["length"]), operands, jax.tree.structure(shape)


def _groups(body: _Body, policy: Policy) -> list[_Group]:
    """Which layers offload, which do what `other_layers` says, which are resident."""
    n = body.layers
    offloaded = _that_fit(body, policy, policy.offloaded_layers(n))
    resident = n - min(policy.resident_layers, n)
    groups = [
        _Group(0, offloaded, Layers()),
        _Group(offloaded, resident, Layers(policy.other_layers, "other_layers")),
        _Group(resident, n, Layers("save", "resident")),
    ]
    return [g for g in groups if g.stop > g.start] or groups[:1]


def _that_fit(body: _Body, policy: Policy, offloaded: int) -> int:
    """As many of the layers that should offload as the pinned host pool holds."""
    if not offloaded or host_pool_bytes() is None:
        return offloaded
    made = for_all_inputs(body.jaxpr, body.roles, policy, False, True, Layers())
    return layers_that_fit("scan", offloaded, host_bytes(made), policy.on_host_full)


def _run(body, operands, groups, reverse, unroll, policy, strict) -> list[Any]:
    first, last = body.consts, body.consts + body.carry
    consts, carry, xs = operands[:first], operands[first:last], operands[last:]

    def step(layers: Layers, carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        out = bind(body.jaxpr, [*consts, *carry, *x], roles=body.roles, policy=policy, strict=strict, layers=layers)
        return out[: body.carry], out[body.carry :]

    parts: list[list[Any]] = []
    for start, stop, layers in groups:
        rows = slice(body.layers - stop, body.layers - start) if reverse else slice(start, stop)
        part = xs if len(groups) == 1 else [x[rows] for x in xs]
        carry, ys = lax.scan(
            functools.partial(step, layers),
            carry,
            part,
            length=stop - start,
            reverse=reverse,
            unroll=unroll,
        )
        parts.insert(0 if reverse else len(parts), ys)
    ys = parts[0] if len(parts) == 1 else [lax.concatenate(rows, 0) for rows in zip(*parts, strict=True)]
    return [*carry, *ys]
