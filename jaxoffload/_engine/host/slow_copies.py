"""Warn when a program that offloads was compiled for an NVIDIA GPU without the options that let its copies overlap."""

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ..._errors import warn
from ..._jax import Compilation, lower_call, when_compiled

_PLATFORM = "cuda"
_OF_GPUS = "xla_gpu_"  # whoever gives one of XLA's options for GPUs has chosen
_FLAG = "xla_gpu_enable_while_loop_double_buffering"  # one of `xla_flags()` that is set for nothing else
_WARNING = (
    "a program that offloads was compiled without the options that let its copies overlap; compile it with "
    "jax.jit(step, compiler_options=jaxoffload.compiler_options()), or set XLA_FLAGS to "
    "jaxoffload.write_xla_flags('copies.pbtxt') where a framework calls jax.jit"
)


def lower_and_note(offloads: Callable[..., bool]) -> Callable[..., Any]:
    """The lowering rule of a `Call`; it notes modules for GPUs, if `offloads` says so of the equation's parameters."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if _PLATFORM in ctx.module_context.platforms and offloads(**params):
            when_compiled(ctx, _warn)
        return lower_call(ctx, *operands, **params)

    return lower


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """For programs that are compiled to be compared, not to be fast."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=f"jaxoffload: {re.escape(_WARNING)}")
        yield


def _warn(compilation: Compilation) -> None:
    of_gpus = any(name.startswith(_OF_GPUS) for name in compilation.options)
    if not of_gpus and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        warn(_WARNING)
