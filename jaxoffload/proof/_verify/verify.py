"""verify(): each claim about a loss or a training step, checked on the program itself."""

from collections.abc import Callable, Iterator
from typing import Any

from ..._jax import without_remat3
from ..._policy import check_call
from .._check import Check, Verification
from .._program.target import target_of
from .conservation import conservation
from .copies import copies
from .gradients import gradients
from .moves import moves, producers
from .placement import placement
from .repeats import repeats

CHECKS = (gradients, conservation, moves, producers, copies, placement, repeats)  # named as their claims


@without_remat3
def verify(f: Callable[..., Any], *args: Any) -> Verification:
    """Check what is claimed of `f`, a loss or a training step, and of its residuals.

    1. `gradients`: every result equals the reference's, which is plain `lax.scan` and `jax.checkpoint`, keeping the
       same values on the device: bit for bit, or within 4 times the reference's own rounding error.
    2. `conservation`: every byte that leaves the device appears on the host.
    3. `moves`: only values marked offload, or values that were on the host before, are moved there.
    4. `producers`: saved and offloaded values are not recomputed.
    5. `copies`: all are asynchronous, in range and on no stream that computes; nothing else touches host memory.
    6. `placement`: collectives give devices no more than in the reference, and no device stores a larger shard.
    7. `repeats`: equal arguments give equal results, and memory does not grow, on the devices and in the process.

    docs/verify-and-report.md says how each is checked, and what is not, and why.

    Args:
      f: a loss or a step. A function that returns a floating-point scalar is a loss, which is differentiated with
        respect to all floating-point arguments; any other is a step, and runs as it is, as does what takes an
        `nnx.Optimizer`. Donated arguments are kept. What `f` changes in modules of Flax NNX is a result too; the
        modules stay as they are.
      args: its arguments: pytrees of arrays, or of `jax.ShapeDtypeStruct`s, for which arrays are made (magnitudes of
        normally distributed numbers, times 0.02; integers and booleans 0 or 1).

    Returns:
      One `Check` per claim. A claim that fails raises nothing.

    Raises:
      TypeError: f is not a function.
      PolicyError, HostPoolFull, NotImplementedError: as `scan`, `chain`, `checkpoint` and `accumulate` do.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxoffload import Policy, scan, tag, verify
      >>> def loss(x, w):
      ...     layer = lambda x, w: (jnp.tanh(tag(x @ w, "fc1")), None)
      ...     policy = Policy({"fc1": "offload"}, min_offload_bytes=0)
      ...     return jnp.sum(scan(layer, x, w, policy=policy)[0])
      >>> verification = verify(loss, jnp.ones((2, 8)), jnp.full((3, 8, 8), 0.1))
      >>> verification.ok
      True
      >>> print(verification["moves"])
      holds        moves: of 1 value(s) that go to the host 1 are marked offload
    """
    check_call("verify", f, args)
    return Verification(tuple(checks(f, *args)))


def checks(f: Callable[..., Any], *args: Any) -> Iterator[Check]:
    """Yield the checks of `verify`, each when it is done."""
    target = target_of(f, args)
    yield from (Check(check.__name__, *check(target)) for check in CHECKS)
