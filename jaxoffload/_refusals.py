"""Refuse the versions, settings and programs under which offloading would fail or give wrong gradients."""

import re

import jax
import jaxlib
from jax.extend.core import Jaxpr

from ._jax import ordered_effects

_FIRST_RIGHT_JAXLIB = (0, 11, 2)


def refuse_remat3() -> None:
    """Raise under JAX's rewrite of `jax.checkpoint`, in which a policy does not see names."""
    if getattr(jax.config, "jax_remat3", False):
        raise NotImplementedError(
            "jaxoffload: jax_remat3 is on, with which names are lost and XLA computes on the host; "
            "switch it off with jax.config.update('jax_remat3', False)"
        )


def refuse_wrong_offload() -> None:
    """Raise where offloaded residuals are known to come back wrong, before anything is compiled."""
    refuse_remat3()
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
