"""The capacity of the device: whether a program fits on it."""

from typing import Any

import jax

from ..._text import readable
from .._program.memory import memory_plan


def device_bytes() -> int | None:
    """Return the bytes that a device offers; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def bytes_needed(program: Any, copies: int = 1) -> int:
    """Return the device memory that XLA planned for a program, with so many copies of its arguments."""
    planned = memory_plan(program)
    if planned is None:
        return 0
    return copies * planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes


def has_room_for(program: Any, copies: int = 1) -> bool:
    """Return if a program with so many copies of its arguments fits on the device, as far as both tell."""
    limit = device_bytes()
    return limit is None or bytes_needed(program, copies) <= limit


def need(program: Any, what: str = "the reference", copies: int = 1) -> str:
    return f"{what} needs {readable(bytes_needed(program, copies))} of a device's {readable(device_bytes() or 0)}"
