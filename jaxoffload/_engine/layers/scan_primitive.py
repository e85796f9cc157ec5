"""The primitive of `scan`: a `lax.scan` under a policy, until it is differentiated.

The JVP rule linearises the body (`layer.py`), decides which layers offload, and leaves two equations: the forward loop
(`loops.py`), which also keeps the residuals, and a linear map of tangents whose transpose is the backward loop.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun, new_jaxpr_eqn
from jax.sharding import AxisType

from ... import _jax
from ..._jax import Results, Values, evaluate
from ..._policy import Policy
from ..._tracing import tracing, under
from ..decide.checkpoint_primitive import bind
from ..decide.derivative import cached
from ..decide.plan import Override
from ..host.limit import admitted
from .layer import Body, keeps_some, linearize, perturbed_carry
from .loops import run_backward, run_forward
from .passes import Loops
from .segments import Segment, joined, reads_of, segments_of
from .transpose_only import with_tangents


def in_our_scan[F: Callable[..., Any]](f: F) -> F:
    """Return `f`, traced as the body of a `scan` is."""
    return under(in_scan=True, stage_axis=None)(f)


def on_a_stage(axis: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which code is traced as for one device along a mesh axis, as in a `shard_map` over it."""
    mesh = jax.sharding.get_abstract_mesh().update_axis_types({axis: AxisType.Manual})
    return jax.sharding.use_abstract_mesh(mesh)


class OnStage:
    """A scan, traced where its devices run only a part of the layers: inside a `shard_map` over the mesh axis `stage`.

    A parameter of an equation, in which JAX is not to find the jaxpr. If tracing failed, that is raised when the jaxpr
    is asked for: this scan may be one that all devices run.
    """

    def __init__(self, traced: Jaxpr | Exception):
        self._traced = traced

    @property
    def call_jaxpr(self) -> Jaxpr:
        if isinstance(self._traced, Exception):
            raise self._traced
        return self._traced


def traced_on_a_stage(axis: str, lax_scan: Callable[..., Any], init: Any, xs: Any) -> OnStage:
    def shape(x: Any) -> jax.ShapeDtypeStruct:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)

    with on_a_stage(axis):
        try:
            jaxpr = jax.make_jaxpr(lax_scan)(*jax.tree.map(shape, (init, xs)))
            _refuse_other_meshes(jaxpr)
        except Exception as error:
            why = str(error).partition("\n")[0]
            refused = NotImplementedError(
                f"accumulate: stages={axis!r}: the layers cannot be traced as a stage runs them, in a shard_map over "
                f"{axis!r}: {why}; leave {axis!r} out of their shardings, and make each shard_map in the layer, "
                "without mesh"
            )
            refused.__cause__ = error
            return OnStage(refused)
        return OnStage(_alone(jaxpr.eqns[the_scan(jaxpr)]))


def _refuse_other_meshes(jaxpr: Jaxpr) -> None:
    """Raise if a result has been constrained to a mesh of the user's, in which a stage is not alone."""
    here, results = jax.sharding.get_abstract_mesh(), jaxpr.eqns[the_scan(jaxpr)].outvars
    avals: list[Any] = [v.aval for v in results]
    if any(aval.sharding.mesh not in (here, _NO_MESH) for aval in avals):
        raise ValueError("a result is constrained by a NamedSharding; use a PartitionSpec")


_NO_MESH = jax.sharding.AbstractMesh((), ())


def the_scan(jaxpr: Jaxpr) -> int:
    """The number of the one `lax.scan` of a traced call of it, behind what its constants need."""
    scans = [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive is lax.scan_p]
    if not scans:
        raise NotImplementedError("jaxoffload: lax.scan does not trace to a scan here; switch jax_scan3 off")
    return max(scans)


def with_our_scan(jaxpr: Jaxpr, policy: Policy, strict: bool, on_stage: OnStage | None = None) -> Jaxpr:
    """`jaxpr` with its one `lax.scan` replaced by ours."""
    at = the_scan(jaxpr)
    equation = our_equation(jaxpr.eqns[at], policy, strict, on_stage)
    return jaxpr.replace(eqns=[*jaxpr.eqns[:at], equation, *jaxpr.eqns[at + 1 :]])


def our_equation(eqn: JaxprEqn, policy: Policy, strict: bool, on_stage: OnStage | None = None) -> JaxprEqn:
    """The equation of ours that stands for one of `lax.scan`."""
    call_jaxpr = _alone(eqn)
    if (trial := tracing().trial) is not None:
        trial.scans.append(call_jaxpr)
        policy, strict = trial.policy, False
    params = {"call_jaxpr": call_jaxpr, "policy": policy, "strict": strict, "on_stage": on_stage, "microbatches": 1}
    return new_jaxpr_eqn(eqn.invars, eqn.outvars, scan_p, params, eqn.effects, eqn.source_info, eqn.ctx)


def _alone(eqn: JaxprEqn) -> Jaxpr:
    """A jaxpr of one equation, a `lax.scan`."""
    return jax.make_jaxpr(functools.partial(lax.scan_p.bind, **eqn.params))(*(v.aval for v in eqn.invars))


def body_of(call_jaxpr: Jaxpr) -> Body:
    """The body of the one `lax.scan` in a jaxpr."""
    (eqn,) = call_jaxpr.eqns
    return body_of_scan(eqn)


def body_of_scan(eqn: JaxprEqn) -> Body:
    """The body of a `lax.scan`, in which xs and ys have one axis less."""
    jaxpr = eqn.params["jaxpr"]
    same = lambda outer, inner: sum(o.aval.ndim == i.aval.ndim for o, i in zip(outer, inner, strict=True))
    carry = same(eqn.outvars, jaxpr.outvars)
    return Body(jaxpr, same(eqn.invars, jaxpr.invars) - carry, carry)


def _checked(run: Callable[..., list[Any]], *operands: Any, policy: Policy, strict: bool, **_: Any) -> list[Any]:
    """Run the checked scan, as `checkify` made it: its scan carries the error, and stays ours."""
    return evaluate(with_our_scan(jax.make_jaxpr(run)(*operands), policy, strict), operands)


def _batch(
    axis: Any, args: Values, dims: Values, *, call_jaxpr: Jaxpr, policy: Policy, strict: bool, **_: Any
) -> Results:
    """Batch as `lax.scan` does, before differentiation: each layer then sums its weights' cotangents."""
    batched, mapped = _jax.batch_jaxpr_axes(call_jaxpr, axis, dims, [_jax.zero_if_mapped] * len(call_jaxpr.outvars))
    outs = evaluate(with_our_scan(batched, policy, strict), args)
    return outs, [0 if m else None for m in mapped]


def _jvp(
    primals: Values,
    tangents: Values,
    *,
    call_jaxpr: Jaxpr,
    policy: Policy,
    strict: bool,
    microbatches: int,
    **_: Any,
) -> Results:
    body, params = body_of(call_jaxpr), dict(call_jaxpr.eqns[0].params)
    jaxpr = params.pop("jaxpr")
    perturbed = _jax.perturbed(tangents)
    plain = tracing().reference or _others_keep(body, perturbed, policy, strict)
    if plain:
        # XLA merges what is computed twice where layers stand side by side; our loops have a barrier there.
        jaxpr = _checkpointed(jaxpr, body.roles, policy, params["unroll"] != 1 or params["length"] == 1)
    if not params["length"] or plain:
        return _jax.primitive_jvps[lax.scan_p](primals, tangents, jaxpr=jaxpr, **params)
    loops = forward_loops(call_jaxpr, perturbed, policy, strict, microbatches)
    layer = loops.segments[0].layer
    outs = run_forward(loops, *primals)
    primals_out, saved = outs[: loops.results], outs[loops.results :]
    return with_tangents(
        primals_out,
        layer.out_perturbed,
        [_jax.instantiate_zeros(t) for t, p in zip(tangents, layer.perturbed, strict=True) if p],
        caller="scan",
        kept=[*(primals[number] for number, _ in loops.reads), *saved],
        transpose=functools.partial(_transpose, loops),
        layers=[segment.layer for segment in loops.segments],
    )


def _others_keep(body: Body, perturbed: Sequence[bool], policy: Policy, strict: bool) -> bool:
    """Return if layers around this scan keep some of what it names. They keep it like any other value of theirs, as
    JAX's nested checkpoints do: stacks of its own on the host would be copied into theirs, from the host to the host.
    """
    if not tracing().around_layers:
        return False
    closed = perturbed_carry(body, perturbed, policy)
    return keeps_some(tracing().around, linearize(body, closed, policy, strict, Override()))


@cached
def _checkpointed(jaxpr: Jaxpr, roles: tuple[str, ...], policy: Policy, prevent_cse: bool) -> Jaxpr:
    """A body under `checkpoint`, as the reference runs it. Where layers under the same policy are around it, they have
    kept what that keeps.
    """
    run: Callable[..., Any] = jax.checkpoint(jaxpr_as_fun(jaxpr.replace()), prevent_cse=prevent_cse)
    if policy != tracing().around or tracing().reference:
        how = {"roles": roles, "policy": policy, "strict": False, "prevent_cse": prevent_cse}
        run = lambda *args: bind(jaxpr.replace(), args, **how)
    return jax.make_jaxpr(run)(*jaxpr.in_avals)


def forward_loops(
    call_jaxpr: Jaxpr, perturbed: Sequence[bool], policy: Policy, strict: bool, microbatches: int
) -> Loops:
    """Return the forward pass of a scan that is differentiated with respect to the perturbed operands.

    `microbatches`: how many share the host. Loops of several run beside each other: these are as few as can be.
    """
    body, params = body_of(call_jaxpr), call_jaxpr.eqns[0].params
    closed = perturbed_carry(body, perturbed, policy)
    each = sum(linearize(body, closed, policy, strict, Override()).sizes.host)
    offloaded = policy.offloaded_layers(params["length"]) if each else 0
    if offloaded:
        need = lambda layers: microbatches * each * (layers + 1)  # and a padding row
        caller, of = ("scan", "") if microbatches == 1 else ("accumulate", f" of {microbatches} microbatches")
        offloaded = admitted(caller, [body.jaxpr], offloaded, need, policy.on_host_full, of)
    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    loops = loops_of_layers(body, closed, policy, strict, offloaded=offloaded, **how)
    return loops if microbatches == 1 else dataclasses.replace(loops, segments=joined(loops.segments))


def with_fewer_layers(loops: Loops, offloaded: int) -> Loops:
    """Return the forward pass in which at most so many layers offload."""
    layer = loops.segments[0].layer
    offloaded = min(offloaded, sum(segment.on_host for segment in loops.segments))
    how = {"length": loops.length, "reverse": loops.reverse, "unroll": loops.unroll, "offloaded": offloaded}
    fewer = loops_of_layers(layer.whole_body, layer.perturbed, layer.plan.policy, False, **how)
    return dataclasses.replace(fewer, segments=joined(fewer.segments))


def backward_loops(loops: Loops, wanted: Sequence[bool]) -> Loops:
    """Return the backward pass of a scan, of which those perturbed results have cotangents that are `wanted`."""
    layer = loops.segments[0].layer
    consts, carry = sum(layer.perturbed[: layer.consts]), sum(layer.out_perturbed[: layer.carry])
    segments = tuple(segment._replace(jaxpr=segment.layer.backward(tuple(wanted))) for segment in loops.segments)
    return dataclasses.replace(loops, segments=segments, consts=consts, carry=carry, wanted=tuple(wanted))


def _transpose(loops: Loops, kept: Values, cotangents: Values) -> list[Any]:
    layer = loops.segments[0].layer
    carry = sum(layer.out_perturbed[: layer.carry])
    wanted = [number < carry or p for number, p in enumerate(_jax.perturbed(cotangents))]
    present = [_jax.instantiate_zeros(ct) for ct, w in zip(cotangents, wanted, strict=True) if w]
    return run_backward(backward_loops(loops, wanted), *kept, *present)


def _partial_eval(saveable: Any, unknown: Any, instantiate: Any, eqn: JaxprEqn) -> Any:
    """Inside a checkpoint nothing of it is differentiated: it is a `lax.scan`, and its names are the checkpoint's."""
    rule = _jax.partial_eval_rules[lax.scan_p]
    params = eqn.params["call_jaxpr"].eqns[0].params
    return rule(saveable, unknown, instantiate, eqn.replace(primitive=lax.scan_p, params=params))


@cached
def loops_of_layers(
    body: Body,
    perturbed: tuple[bool, ...],
    policy: Policy,
    strict: bool,
    *,
    offloaded: int,
    length: int,
    reverse: bool,
    unroll: int,
) -> Loops:
    """The forward pass. Residuals that are operands are read where they are."""
    layer = linearize(body, perturbed, policy, strict, Override())
    segments = [Segment(0, length, 0, layer.forward, layer)]
    if any(layer.sizes.host):
        recomputing = lambda: linearize(body, perturbed, policy, strict, Override("recompute", "other_layers"))
        between = recomputing if policy.other_layers == "recompute" else None
        segments = segments_of(layer, between, length, offloaded, policy.resident_layers)
    reads = reads_of(segments, body.consts)
    return Loops(tuple(segments), length, reverse, unroll, body.consts, body.carry, reads)


scan_p = _jax.define(
    _jax.Call("jaxoffload_scan", _checked),
    eager=lambda *operands, call_jaxpr, **_: evaluate(call_jaxpr, operands),
    jvp=_jvp,
    batch=_batch,
    partial_eval=_partial_eval,
)
