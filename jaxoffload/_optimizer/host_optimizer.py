"""host_optimizer(): an Optax transformation whose state lives in pinned host memory."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path

from .._engine.host.limit import HostPoolFull, auto_axes, host_pool_bytes
from .._jax import HOST, define, on_device, on_host
from .._policy import Policy, check_arguments, check_switches
from .._text import readable, short
from .._tracing import tracing
from .masters import join_masters, split_masters
from .placement import Placements, owners, placed
from .update import Update


class HostState(NamedTuple):
    """The state of a `HostOptimizer`.

    Attributes:
      inner: the transformation's.
      remainders: as the parameters; int16, what a float32 master has beyond the bfloat16 weight; None for a parameter
        without a master.
    """

    inner: Any
    remainders: Any


_OFFLOAD = Policy(default="offload")
_APPLY = "host_optimizer: apply(gradients, params, state):"


def host_optimizer(
    tx: Any,
    *,
    policy: Policy = _OFFLOAD,
    shardings: Any = None,
    masters: bool = False,
    state_dtype: Any = None,
) -> "HostOptimizer":
    """Return an optimizer that computes what `tx` does, with its state in pinned host memory.

    Its `apply` stands for `tx.update` and `optax.apply_updates`. A loop goes over blocks of rows, of a stack of layers
    over the layers: it fetches the state of the next block while it updates this one on the device and writes its state
    back. The device never holds a whole state, nor a set of updates. The bits are those of `tx` on the device, as far
    as XLA compiles the same arithmetic alike.

    Args:
      tx: an Optax transformation, which must compute each row of an array's first axis from the same row of the
        gradient, of the state and of the parameter, as Adam, Lion, momentum and Muon on stacks of layers do. What reads
        no state on the host may mix rows and arrays: `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(...))`.
      policy: "offload" or "save" for the state of a parameter, by its name, such as "layers/mlp/w"; `default` for that
        of others. Less than `min_offload_bytes` of one parameter, on all devices, is saved.
      shardings: of the parameters, a pytree prefix. A mesh with Auto axes divides them, and a trace does not show how.
      masters: keep a float32 master of each bfloat16 parameter. The parameter is its master rounded, ties to the larger
        integer, and the state has the 16 bits that it lacks. `tx` sees masters, and gradients in float32.
      state_dtype: in which the state stores floating arrays that are like parameters. `tx` sees them in the dtype in
        which its `init` makes them; None stores them so.

    Raises:
      TypeError: an argument is of another type.

    Raises (when `init`, `apply` or `placements` is called, before anything is compiled):
      TypeError: a parameter is no array.
      PolicyError: a pattern matches no parameter, or says recompute.
      NotImplementedError: `tx` mixes the layers of a stack, or arrays, whose state is on the host.
      ValueError: the compiler may divide the parameters, and `shardings` is None.
      HostPoolFull: (`init`) the pinned host pool cannot hold the state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxoffload import Policy, host_optimizer
      >>> params = {"layers": jnp.ones((4, 8, 8))}
      >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> policy = Policy(default="offload", min_offload_bytes=0)
      >>> tx = host_optimizer(optax.adamw(1e-3), policy=policy, shardings=one)
      >>> step = jax.jit(tx.apply, donate_argnums=(1, 2))
      >>> params, state = step({"layers": jnp.ones((4, 8, 8))}, params, tx.init(params))
      >>> print(tx.placements(params))
      parameter  state     place  blocks  reason
      layers     2.00 KiB  host   4       default
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"host_optimizer: tx must be an optax.GradientTransformation, got {short(tx)}")
    check_arguments("host_optimizer", policy)
    check_switches("host_optimizer", masters=masters)
    dtype = None if state_dtype is None else jnp.dtype(state_dtype)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"host_optimizer: state_dtype must be a floating dtype, such as bfloat16, got {dtype}")
    if wrong := [x for x in jax.tree.leaves(shardings) if not isinstance(x, jax.sharding.Sharding)]:
        raise TypeError(
            f"host_optimizer: shardings has {short(wrong[0])}; use a jax.sharding.Sharding for each, such as "
            "NamedSharding(mesh, PartitionSpec('data'))"
        )
    return HostOptimizer(tx, policy, shardings, masters, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class HostOptimizer:
    """What `host_optimizer` returns: its arguments, and the functions of an optimizer."""

    tx: Any
    policy: Policy
    shardings: Any
    masters: bool
    state_dtype: Any

    def __getattr__(self, name: str) -> Any:
        """Say what stands for `update`, which `nnx.Optimizer` and others call."""
        why = "write params, state = optimizer.apply(gradients, params, state)" if name == "update" else ""
        raise AttributeError(f"host_optimizer: the optimizer has no {name!r}" + f"; {why}" * bool(why))

    def init(self, params: Any) -> HostState:
        """Return the state of parameters, each array where `placements` says, sharded as its parameter."""
        state, placements = self._shape_of_state(params), self.placements(params)
        need = sum(placed.bytes_per_device for placed in placements if placed.place == "host")
        if (pool := host_pool_bytes()) is not None and need > pool:
            what = f"the state needs {readable(need)} per device, and the pinned host pool holds {readable(pool)}"
            raise HostPoolFull("host_optimizer", what, need, pool, None, False)
        update = self._update(lambda params, _: self.first_state(params), params, state)
        leaves, tree = jax.tree.flatten(state)
        make = jax.jit(lambda *params: update.run([*params, *[None] * len(leaves)]), inline=True)
        return jax.tree.unflatten(tree, make(*jax.tree.leaves(params)))

    def apply(self, gradients: Any, params: Any, state: HostState) -> tuple[Any, HostState]:
        """Return the parameters after a step, and the new state. Call it in jit, and donate `params` and `state`.

        jit pairs what is donated with results of the same shape and dtype in order, whatever memory they are in. So
        let your step take parameters and state in the order in which it returns them.

        Args:
          gradients: as `params`, in any floating dtype.
          params: on the device.
          state: what `init` or `apply` returned.

        Raises:
          TypeError: gradients or state are not those of `params`.
        """
        if isinstance(params, HostState):
            raise TypeError(f"{_APPLY} params is the state; the order is not that of tx.update")
        if not isinstance(state, HostState):
            raise _differs("state", f"a {type(state).__name__}; the transformation's own init makes another")
        _check_trees(gradients, params, state, self._shape_of_state(params))
        update = self._update(self.updated, gradients, params, state)
        there = lambda x: x if on_host(jax.typeof(x)) else _there_p.bind(x)
        given, tree = jax.tree.flatten((gradients, params, state))
        inputs = zip(given, update.jaxpr.invars, strict=True)
        operands = [there(x) if v in update.on_host else on_device(x) for x, v in inputs]
        if tracing().reference:
            return self.updated(*jax.tree.unflatten(tree, map(on_device, operands)))
        return jax.tree.unflatten(jax.tree.structure((params, state)), update.run(operands))

    def placements(self, params: Any) -> Placements:
        """Return where the state of parameters, or of their shapes and dtypes, lives; printed, it is a table."""
        state = self._shape_of_state(params)
        return Placements(self._update(self.updated, params, params, state).placements)

    def state_shardings(self, params: Any) -> HostState:
        """Return the shardings of the state, with the memory that each array is in: for `jax.jit`'s `out_shardings`, or
        to read a checkpoint. Parameters may be given as shapes, dtypes and shardings."""
        state, placements = self._shape_of_state(params), self.placements(params)

        def of(leaf: int | None, x: Any) -> Any:
            placed = placements[leaf or 0]
            sharding = placed.sharding_of(x)
            if isinstance(sharding, NamedSharding) and (x.sharding or leaf is None):
                spec = x.sharding.spec if x.sharding else PartitionSpec()  # with Explicit axes its type says it
                sharding = NamedSharding(sharding.mesh, spec)
            is_on_host = leaf is not None and placed.place == "host"
            return sharding.with_memory_kind("pinned_host") if is_on_host else sharding

        leaves, tree = jax.tree.flatten(state)
        return jax.tree.unflatten(tree, map(of, owners(state, params), leaves))

    def _shape_of_state(self, params: Any) -> HostState:
        for path, x in tree_leaves_with_path(params):
            if not hasattr(x, "dtype"):
                advice = "leave out what is no array, as with eqx.partition(model, eqx.is_inexact_array)"
                raise TypeError(f"host_optimizer: params{keystr(path)} must be an array, got {short(x)}; {advice}")
        return jax.eval_shape(self.first_state, params)

    def _update(self, f: Callable[..., Any], *args: Any) -> Update:
        """Return `f` of these trees, divided. It updates the last, the state; the others are as the parameters."""
        *others, state = args
        placements = placed(self.policy, others[-1], state, self._shardings(others[-1]))
        of_others = [*range(len(placements))] * len(others)
        leaves, tree = jax.tree.flatten(args)
        avals = jax.make_jaxpr(lambda *xs: list(map(on_device, xs)))(*leaves).out_avals
        jaxpr = jax.make_jaxpr(lambda *xs: jax.tree.leaves(f(*jax.tree.unflatten(tree, xs))))(*avals)
        return Update(jaxpr, [*of_others, *owners(state, others[-1])], len(of_others), placements)

    def updated(self, gradients: Any, params: Any, state: HostState) -> tuple[Any, HostState]:
        """Return what `apply` does, from arrays that are all on the device: what it is to be equal to."""
        weights = _masters(params, state.remainders)
        if self.masters:
            gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
        seen = jax.eval_shape(self.tx.init, weights)
        updates, inner = self.tx.update(gradients, _cast(state.inner, seen), weights)
        weights = jax.tree.map(lambda x, u: (x + u).astype(x.dtype), weights, updates)  # as `optax.apply_updates`
        inner = _cast(inner, state.inner)
        part = lambda k: lambda x, r: (x, None)[k] if r is None else split_masters(x)[k]
        weights, remainders = (jax.tree.map(part(k), weights, state.remainders) for k in (0, 1))
        return weights, HostState(inner, remainders)

    def first_state(self, params: Any) -> HostState:
        """Return what `init` does, on the device."""
        has_master = lambda x: self.masters and x.dtype == jnp.bfloat16
        remainders = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.int16) if has_master(x) else None, params)
        inner = self.tx.init(_masters(params, remainders))
        if self.state_dtype is not None:
            leaves, tree = jax.tree.flatten(inner)
            casts = lambda owner, x: owner is not None and jnp.issubdtype(x.dtype, jnp.floating)
            of = owners(inner, params)
            leaves = [x.astype(self.state_dtype) if casts(n, x) else x for n, x in zip(of, leaves, strict=True)]
            inner = jax.tree.unflatten(tree, leaves)
        return HostState(inner, remainders)

    def _shardings(self, params: Any) -> list[Any]:
        """Return the sharding of each parameter; None where it is on one device."""
        if self.shardings is not None:
            return jax.tree.leaves(jax.tree.broadcast(self.shardings, params))
        return list(map(_sharding, jax.tree.leaves(params)))


def _sharding(x: Any) -> Any:
    if not isinstance(x, jax.core.Tracer):
        return getattr(x, "sharding", None)
    if (sharding := jax.typeof(x).sharding).mesh.explicit_axes:
        return sharding
    if auto_axes():
        raise ValueError(
            "host_optimizer: a mesh may divide the parameters, which a trace does not show; give their shardings: "
            "host_optimizer(tx, shardings=jax.tree.map(lambda x: x.sharding, params))"
        )
    return None


# An array that is in host memory though its type does not say so: as jit's in_shardings, out_shardings of what made it,
# `jax.make_array_from_callback` and `jax.ShapeDtypeStruct` have it.
_there_p = define(
    Primitive("jaxoffload_there"),
    eager=lambda x: jax.device_put(x, HOST),
    results=lambda aval: aval.update(memory_space=HOST),
    lower=lambda _, x: [x],
)


def _masters(params: Any, remainders: Any) -> Any:
    """Return parameters as `tx` sees them."""
    return jax.tree.map(lambda x, r: x if r is None else join_masters(x, r), params, remainders)


def _cast(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, like: x.astype(like.dtype), tree, like)


def _check_trees(gradients: Any, params: Any, state: Any, first: Any) -> None:
    for name, given, like in (("gradients", gradients, params), ("state", state, first)):
        dtype = lambda x: x.dtype if name == "state" else ""
        arrays = lambda tree: [f"{keystr(path)} {dtype(x)}{list(x.shape)}" for path, x in tree_leaves_with_path(tree)]
        if arrays(given) != arrays(like):
            differ = [array for array in arrays(given) if array not in arrays(like)] or ["fewer arrays"]
            raise _differs(name, differ[0])


def _differs(name: str, got: str) -> TypeError:
    like = "params" if name == "gradients" else "what init returns for params"
    return TypeError(f"{_APPLY} {name} must be as {like}, got {got}")
