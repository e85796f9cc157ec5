"""Warn when a program that offloads was compiled for an NVIDIA GPU without the options that let its copies overlap.

A lowering rule cannot know them: options may come later, with `.lower(...).compile(compiler_options=...)`. So the rule
notes that the module offloads, and a listener of `jax.monitoring` looks at the options when a module is compiled.
"""

import contextlib
import functools
import os
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .._errors import NOT_THE_USERS
from .._jax import COMPILED, lower_call, this_compilation

_PLATFORM = "cuda"
_OF_GPUS = "xla_gpu_"  # whoever gives one of XLA's options for GPUs has chosen
_FLAG = "xla_gpu_enable_while_loop_double_buffering"  # one of `xla_flags()` that is set for nothing else
_WARNING = (
    "jaxoffload: a program that offloads was compiled without the options that let its copies overlap; compile "
    "it with jax.jit(step, compiler_options=jaxoffload.compiler_options()), or set XLA_FLAGS to "
    "jaxoffload.xla_flags('copies.pbtxt') where a framework calls jax.jit"
)
_offloading: weakref.WeakSet[Any] = weakref.WeakSet()  # modules that are lowered and not compiled yet


def lower_and_note(offloads: Callable[..., bool]) -> Callable[..., Any]:
    """The lowering rule of a `Call`; it notes modules for GPUs, if `offloads` says so of the equation's parameters."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        if _PLATFORM in ctx.module_context.platforms and offloads(**params):
            _listen()
            _offloading.add(ctx.module_context.module)
        return lower_call(ctx, *operands, **params)

    return lower


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """For programs that are compiled to be compared, not to be fast."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=re.escape(_WARNING))
        yield


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_look)


def _look(event: str, *_: Any, **__: Any) -> None:
    if event != COMPILED or not _offloading or not (compilation := this_compilation()):
        return
    module, options = compilation
    if module not in _offloading:
        return
    _offloading.discard(module)
    if _FLAG not in os.environ.get("XLA_FLAGS", "") and not any(name.startswith(_OF_GPUS) for name in options):
        warnings.warn(_WARNING, skip_file_prefixes=NOT_THE_USERS)
