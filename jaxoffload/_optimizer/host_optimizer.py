"""host_optimizer(): an Optax transformation whose state lives in pinned host memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from .._engine.host.limit import auto_axes
from .._jax import HOST, define, on_device, on_host
from .._policy import Policy, check_switches
from .masters import join, split
from .placement import Placements, owners, placed
from .stream import Blocks
from .update import Input, MixesRows, Output, Update, divided

STACK = 3  # the state of an array of so many axes, one of layers or experts, never comes to the device whole


class Transformation(Protocol):
    """What an `optax.GradientTransformation` has."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class HostState(NamedTuple):
    """The state of a `HostOptimizer`.

    Attributes:
      inner: the transformation's.
      remainders: as the parameters; int16, what a float32 master has beyond the bfloat16 weight; None for a parameter
        without a master.
    """

    inner: Any
    remainders: Any


def host_optimizer(
    tx: Transformation,
    *,
    policy: Policy = Policy(default="offload"),
    shardings: Any = None,
    masters: bool = False,
    state_dtype: Any = None,
) -> "HostOptimizer":
    """Return an optimizer that computes what `tx` does, with its state in pinned host memory.

        tx = jaxoffload.host_optimizer(optax.adamw(1e-4))
        state = tx.init(params)
        params, state = tx.apply(gradients, params, state)  # instead of tx.update and optax.apply_updates

    One loop goes over blocks of rows, of a stack of layers over layers: it fetches the state of the next block, updates
    this one on the device, and writes its state back, at once. There is never a whole state on the device, and never a
    set of updates. The bits are those of `tx` on the device.

    Args:
      tx: an Optax transformation. Where state is on the host it must update each row of an array's first axis from the
        same row of the gradient, the state and the parameter. Adam, AdamW, Lion, Adafactor, momentum, schedules and masks
        do, and Muon on stacks of layers. What needs gradients and the device's arrays alone may mix rows and arrays:
        `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(...))` clips by the norm of all gradients.
      policy: which state is offloaded or saved on the device. Patterns match parameters' names, such as "layers/mlp/w";
        `default` holds for others. State of less than `min_offload_bytes` (of a parameter, on all devices) is saved.
      shardings: of the parameters, a pytree prefix; needed where a mesh with Auto axes divides them, because a trace
        does not show it.
      masters: keep a float32 master of each bfloat16 parameter, which is then its master rounded, ties to the larger.
        The state has the 16 bits that the parameter lacks. `tx` sees masters, and gradients in float32.
      state_dtype: of the floating arrays of the state that are like parameters, as they are stored. `tx` sees them in
        the dtype in which its `init` makes them, which is the default.

    Raises:
      TypeError: an argument is of another type.

    Raises (when `init`, `apply` or `placements` is called):
      PolicyError: a pattern matches no parameter, or says recompute.
      NotImplementedError: `tx` mixes layers of a stack whose state is on the host.
      ValueError: a mesh may divide the parameters, and `shardings` is None.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxoffload import Policy, host_optimizer
      >>> params = {"layers": jnp.ones((4, 8, 8))}
      >>> one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      >>> tx = host_optimizer(optax.adamw(1e-3), policy=Policy(default="offload", min_offload_bytes=0), shardings=one)
      >>> step = jax.jit(tx.apply, donate_argnums=(1, 2))
      >>> params, state = step({"layers": jnp.ones((4, 8, 8))}, params, tx.init(params))
      >>> print(tx.placements(params))
      parameter  state     place  blocks  reason
      layers     2.00 KiB  host   4       default
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise TypeError(f"host_optimizer: tx must be an optax.GradientTransformation, got {tx!r}")
    if not isinstance(policy, Policy):
        raise TypeError(f"host_optimizer: policy must be a jaxoffload.Policy, got {policy!r}")
    check_switches("host_optimizer", masters=masters)
    return HostOptimizer(tx, policy, shardings, masters, state_dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class HostOptimizer:
    """What `host_optimizer` returns: its arguments, and the functions of an optimizer."""

    tx: Transformation
    policy: Policy
    shardings: Any
    masters: bool
    state_dtype: Any

    def init(self, params: Any) -> HostState:
        """Return the state of parameters, each array where `placements` says, and sharded as its parameter."""
        shardings, placements = self._shardings(params), self.placements(params)

        def make(params: Any) -> HostState:
            leaves, tree = jax.tree.flatten(params)
            state, of = jax.eval_shape(self.first_state, params), jax.tree.structure
            outputs = [Output(n, _is_on_host(n, placements), None) for n in owners(state, params)]
            first = lambda *leaves: jax.tree.leaves(self.first_state(jax.tree.unflatten(tree, leaves)))
            update = _update(first, leaves, [Input(n) for n in range(len(leaves))], outputs, placements, shardings)
            return jax.tree.unflatten(of(state), update.run(leaves))

        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params))
        return make(params) if traced else jax.jit(make)(params)

    def apply(self, gradients: Any, params: Any, state: HostState) -> tuple[Any, HostState]:
        """Return the parameters after a step, and the state. Call it in jit, and donate `state` and `params`.

        Args:
          gradients: as `params`, in any floating dtype.
          state: what `init` or `apply` returned.
          params: on the device.

        Raises:
          TypeError: gradients or state are of other parameters, or state that belongs on the host is not there.
        """
        leaves, tree = jax.tree.flatten((gradients, params, state))
        update = self._applied(gradients, params, state)
        on = [there(x) if it.on_host else on_device(x) for x, it in zip(leaves, update.inputs, strict=True)]
        return jax.tree.unflatten(jax.tree.structure((params, state)), update.run(on))

    def placements(self, params: Any) -> Placements:
        """Return where the state of parameters lives, which may be given as shapes and dtypes."""
        state = jax.eval_shape(self.first_state, params)
        blocks = self._applied(params, params, state).blocks
        found = placed(self.policy, params, state, self._shardings(params))
        return Placements(p._replace(blocks=blocks[n].count if n in blocks else 1) for n, p in enumerate(found))

    def _applied(self, gradients: Any, params: Any, state: HostState) -> Update:
        """Return how `apply` runs."""
        shardings = self._shardings(params)
        placements = placed(self.policy, params, state, shardings)
        of_state, count = owners(state, params), len(placements)
        of_params: list[int | None] = [*range(count)]
        inputs = [Input(n, _is_on_host(n, placements)) for n in of_state]
        inputs = [*map(Input, of_params), *map(Input, of_params), *inputs]
        outputs = [Output(x.leaf, x.on_host, count + n) for n, x in enumerate(inputs[count:])]
        leaves, tree = jax.tree.flatten((gradients, params, state))
        updated = lambda *leaves: jax.tree.leaves(self.updated(*jax.tree.unflatten(tree, leaves)))
        return _update(updated, leaves, inputs, outputs, placements, shardings)

    def updated(self, gradients: Any, params: Any, state: HostState) -> tuple[Any, HostState]:
        """Return what `apply` does, from arrays that are all on the device: what it is to be equal to."""
        from optax import apply_updates  # an extra

        weights = self._weights(params, state.remainders)
        if self.masters:
            gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
        seen = jax.eval_shape(self.tx.init, weights)
        updates, inner = self.tx.update(gradients, _cast(state.inner, seen), weights)
        weights, inner = apply_updates(weights, updates), _cast(inner, state.inner)
        if not self.masters:
            return weights, HostState(inner, None)
        part = lambda k: jax.tree.map(
            lambda x, r: (x, None)[k] if r is None else split(x)[k], weights, state.remainders
        )
        return part(0), HostState(inner, part(1))

    def first_state(self, params: Any) -> HostState:
        """Return what `init` does, on the device."""
        inner = self.tx.init(self._weights(params, None))
        if self.state_dtype is not None:
            leaves, tree = jax.tree.flatten(inner)
            casts = lambda owner, x: owner is not None and jnp.issubdtype(x.dtype, jnp.floating)
            of = owners(inner, params)
            leaves = [x.astype(self.state_dtype) if casts(n, x) else x for n, x in zip(of, leaves, strict=True)]
            inner = jax.tree.unflatten(tree, leaves)
        zeros = lambda x: jnp.zeros(x.shape, jnp.int16) if x.dtype == jnp.bfloat16 else None
        return HostState(inner, jax.tree.map(zeros, params) if self.masters else None)

    def _weights(self, params: Any, remainders: Any) -> Any:
        """Return parameters as `tx` sees them; masters of them are rounded ones where there are no remainders."""
        if not self.masters:
            return params
        if remainders is None:
            return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, params)
        return jax.tree.map(lambda x, r: x if r is None else join(x, r), params, remainders)

    def _shardings(self, params: Any) -> list[Any]:
        """Return the sharding of each parameter; None where it is on one device."""
        if self.shardings is not None:
            return jax.tree.leaves(jax.tree.broadcast(self.shardings, params))
        return list(map(_sharding, jax.tree.leaves(params)))


def _sharding(x: Any) -> Any:
    if (sharding := jax.typeof(x).sharding).mesh.explicit_axes:
        return sharding
    if not isinstance(x, jax.core.Tracer):
        return getattr(x, "sharding", None)
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


def there(x: Any) -> Any:
    """Return an array that is in host memory, with a type that says so."""
    return x if on_host(jax.typeof(x)) else _there_p.bind(x)


def _is_on_host(leaf: int | None, placements: Placements) -> bool:
    return leaf is not None and placements[leaf].place == "host"


def _cast(tree: Any, like: Any) -> Any:
    return jax.tree.map(lambda x, like: x.astype(like.dtype), tree, like)


def _update(
    f: Callable[..., Any],
    leaves: Sequence[Any],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    placements: Placements,
    shardings: Sequence[Any],
) -> Update:
    """Return how `f` runs, which takes these leaves and returns leaves.

    Raises:
      NotImplementedError: it mixes what must be apart.
    """
    avals = jax.make_jaxpr(lambda *xs: list(map(on_device, xs)))(*leaves).out_avals
    jaxpr = jax.make_jaxpr(f)(*avals)
    streams = {n for n, p in enumerate(placements) if p.place == "host" and p.blocks > 1}
    while True:
        try:
            blocks = {n: Blocks(placements[n].blocks, shardings[n]) for n in sorted(streams)}
            return divided(jaxpr, inputs, outputs, blocks)
        except MixesRows as mixes:
            name = placements[mixes.leaf].name
            if mixes.other is not None:
                other = f"reads the state of another, such as {placements[mixes.other].name}"
            elif mixes.leaf in streams and len(avals[mixes.leaf].shape) < STACK:
                streams.remove(mixes.leaf)
                continue
            else:
                other = "mixes the rows of its first axis, those of layers"
            raise NotImplementedError(
                f"host_optimizer: the update of {name}, whose state is on the host, {other} ({mixes.how}); keep that on "
                f"the device, Policy({{{name!r}: 'save'}}, default='offload'), or use a transformation that does not"
            ) from None
