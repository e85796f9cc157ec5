"""The memory that XLA planned for a compiled program, and whether a device has it."""

from typing import Any

import jax

from ..._text import readable

VISIBLE = 64 * 2**20  # bytes; memory differs by some MiB for other reasons


def memory_plan(program: Any) -> Any:
    """Return what a compiled program's `memory_analysis()` does: its bytes per device. None where the backend has none,
    or fails to tell, as jaxlib 0.11.2 does of some programs.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxoffload.proof import memory_plan
      >>> program = jax.jit(lambda x: 2 * x).lower(jnp.ones(256)).compile()
      >>> memory_plan(program).output_size_in_bytes
      1024
    """
    try:
        return program.memory_analysis()
    except RuntimeError:  # docs/upstream.md#memory-analysis
        return None


def device_bytes() -> int | None:
    """Return the bytes that a device offers; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def too_large(program: Any, copies: int = 1) -> str:
    """Return what a program with so many copies of its arguments needs, if a device offers less; else empty."""
    if (limit := device_bytes()) is None or (planned := memory_plan(program)) is None:
        return ""
    needed = copies * planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes
    return f"needs {readable(needed)} of a device's {readable(limit)}" if needed > limit else ""
