"""The memory that XLA planned for a compiled program."""

from typing import Any


def memory_plan(program: Any) -> Any:
    """Return `program.memory_analysis()`; None where the backend has none, or fails to tell."""
    try:
        return program.memory_analysis()
    except RuntimeError:  # docs/upstream.md#memory-analysis
        return None
