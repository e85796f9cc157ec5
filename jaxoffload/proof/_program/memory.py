"""The memory that XLA planned for a compiled program."""

from typing import Any


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
