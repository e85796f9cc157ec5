"""scan(): `flax.linen.scan` under a `Policy`. The one module for Flax Linen; `import jaxoffload` does not import it."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ._offload import with_its_scan_ours
from ._policy import Policy, check_arguments

try:
    from flax import linen as nn
    from flax.core import lift
    from flax.linen.transforms import lift_transform
except ImportError as missing:
    raise ImportError(f"jaxoffload.linen needs Flax (pip install flax): {missing}") from missing


def scan(target: Any, *args: Any, policy: Policy, strict: bool = True, **kwargs: Any) -> Any:
    """`flax.linen.scan` under a `Policy`: layers of Flax Linen, scanned by `jaxoffload.scan`.

    It computes what `nn.scan(nn.remat(target), ...)` does, bit for bit, and names variables as `nn.scan(target, ...)`
    does. Variables, random numbers, sown values and other arguments are lifted by Flax. An array that the layers carry,
    and that no layer names, is named "layer_input".

    Args:
      target: a module class, or a function whose first argument is a module. `nn.remat(Layer, policy=policy)`, with
        this policy, does what `Layer` does and keeps the name that Flax gives it.
      args, kwargs: as for `flax.linen.scan`: variable_axes, split_rngs, in_axes, length, methods and so on.
      policy, strict: as for `jaxoffload.scan`.

    Returns:
      As `flax.linen.scan`: a module class, or a function.

    Raises:
      ImportError: (when this module is imported) Flax is not installed.
      TypeError: policy is not a Policy, or strict not a bool; and what `flax.linen.scan` raises.
      NotImplementedError (when called): the layers read or write a `jax.new_ref`.

    Raises (when differentiated): as `jaxoffload.scan`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> import jaxoffload.linen
      >>> from jaxoffload import Policy, residuals, tag
      >>> class Layer(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, _):
      ...         return nn.Dense(8)(jnp.sin(tag(nn.Dense(16)(x), "fc1"))), None
      >>> policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      >>> lifted = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
      >>> layers = jaxoffload.linen.scan(Layer, **lifted, length=3, policy=policy)()
      >>> x = jnp.ones((4, 8))
      >>> variables = layers.init(jax.random.key(0), x, None)
      >>> table = residuals(lambda variables: jnp.sum(layers.apply(variables, x, None)[0]), variables)
      >>> table.host_bytes == 3 * x.shape[0] * 16 * 4
      True
    """
    check_arguments("jaxoffload.linen.scan", policy, strict)
    options = inspect.signature(nn.scan).bind(target, *args, **kwargs).arguments
    methods = options.pop("methods", None)

    @functools.wraps(lift.scan)  # Flax names the class after it
    def lifted(f: Callable[..., Any], **how: Any) -> Callable[..., Any]:
        return _ours(lift.scan(f, **how), policy, strict)

    return lift_transform(lifted, options.pop("target"), methods=methods, **options)


def _ours(scanned: Callable[..., Any], policy: Policy, strict: bool) -> Callable[..., Any]:
    """Return a lifted scan, whose `lax.scan` is ours. All variables go in and out, as for `nn.remat`."""

    def run(scopes_of: Any, variables_of: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        def pure(variables: Any, rngs: Any, args: Any, kwargs: Any) -> Any:
            scopes = scopes_of(variables, rngs)
            return scanned(scopes, *args, **kwargs), variables_of(scopes)

        return with_its_scan_ours(pure, policy, strict, "jaxoffload.linen.scan")(variables, rngs, args, kwargs)

    return lift.pack(run, (True,), (True,), (True,), name="offload", enable_kwargs=True)
