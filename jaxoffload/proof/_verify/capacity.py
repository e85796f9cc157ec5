"""The capacity of the device: whether programs fit on it, and how many layers of a target do."""

from typing import Any

import jax

from ..._text import readable
from .._program.memory import memory_plan
from .._program.target import Target, most_layers_of


def device_bytes() -> int | None:
    """Return the bytes that a device offers; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def bytes_needed(program: Any, copies: int = 1) -> int:
    """Return the device memory that XLA planned for a program, with so many copies of its arguments."""
    planned = memory_plan(program)
    if planned is None:
        return 0
    return copies * planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes


def has_room_for(program: Any, share: float = 1.0, copies: int = 1) -> bool:
    """Return if a program with so many copies of its arguments fits into a share of the device, as far as both tell."""
    limit = device_bytes()
    return limit is None or bytes_needed(program, copies) <= share * limit


def need(program: Any, what: str = "the reference", copies: int = 1) -> str:
    return f"{what} needs {readable(bytes_needed(program, copies))} of a device's {readable(device_bytes() or 0)}"


def reference_that_fits(target: Target) -> Target | None:
    """Return the target, truncated to the most layers whose reference program fits on the device.

    None if no truncation fits, or if the truncated program offloads nothing.
    """
    if has_room_for(target.reference_program):
        return target
    fitting, fit, too_many = None, 0, most_layers_of(target.jaxpr)
    while too_many - fit > 1:
        layers = (fit + too_many) // 2
        fewer = target.with_layers(layers)
        if has_room_for(fewer.reference_program, share=0.9):
            fitting, fit = fewer, layers
        else:
            too_many = layers
    return None if fitting is None or (target.host_transfers and not fitting.host_transfers) else fitting
