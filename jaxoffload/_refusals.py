"""Refuse the versions, settings and programs under which offloading would fail or give wrong gradients."""

import re

import jax
import jaxlib
from jax.extend.core import Jaxpr

from ._jax import ordered_effects

_FIRST_RIGHT_JAXLIB = (0, 11, 2)
_FIRST_RIGHT_REMAT3 = (0, 12)


def refuse_remat3() -> None:
    """Raise if JAX's own checkpoints ask a `Policy` under the first form of `jax_remat3`, which shows it no arrays.

    There, what is set when `jax.checkpoint` is applied counts, not when it is called: docs/upstream.md#jax_remat3.
    """
    if getattr(jax.config, "jax_remat3", False) and jax.__version_info__ < _FIRST_RIGHT_REMAT3:
        raise NotImplementedError(
            f"jaxoffload: jax_remat3 is on, and that of jax {jax.__version__} does not show a Policy the arrays that "
            "have names; install jax >= 0.12, switch it off with jax.config.update('jax_remat3', False), or use "
            "jaxoffload.scan, chain or checkpoint"
        )


def refuse_wrong_offload() -> None:
    """Raise where offloaded residuals are known to come back wrong, before anything is compiled."""
    version = tuple(map(int, re.findall(r"\d+", jaxlib.__version__)[:3]))
    if jax.default_backend() == "gpu" and version < _FIRST_RIGHT_JAXLIB:
        # https://github.com/openxla/xla/pull/46231: residuals offloaded under a scan come back in another order.
        raise NotImplementedError(
            f"jaxoffload: jaxlib {jaxlib.__version__} returns wrong gradients for offloaded residuals on GPU; "
            "install jaxlib >= 0.11.2"
        )


def refuse_ordered_effects(caller: str, jaxpr: Jaxpr) -> None:
    """Raise for ordered effects: JAX cannot lower them together with values in host memory (its `safe_zip` fails)."""
    if ordered := ordered_effects(jaxpr):
        raise NotImplementedError(
            f"{caller}: the function has ordered effects ({', '.join(map(str, ordered))}), and JAX cannot compile "
            "them together with offloaded residuals; use ordered=False, or mark nothing offload"
        )
