"""The backend "mosaic": the Pallas kernels for Hopper GPUs that ship with jax; group sizes stay on the device."""

from typing import Any

import jax
import jax.numpy as jnp

from ._interface import Backend, Shape, unbatched

# Tiles of 128 x 128 x 64: 619 TFLOP/s forward and backward on an H200 (8 groups, 16384 rows, 4096 -> 14336).
_CONTRACTED = 64  # a row of a tile is what one swizzled copy to shared memory moves: 64 values of two bytes
_PIPELINE: dict[str, Any] = {"block_k": _CONTRACTED, "max_concurrent_steps": 4, "grid_block_n": 4}


def refuses(shape: Shape) -> str | None:
    # forward contracts K, dx contracts N, and both tile dw.
    if shape.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{jnp.dtype(shape.dtype).name} operands; allowed are bfloat16 and float16"
    if shape.M < _CONTRACTED:
        return f"M = {shape.M} is less than {_CONTRACTED} rows"
    return shape.not_a_multiple(_CONTRACTED, "K", "N") or shape.not_a_multiple(8, "M")  # 8: a tile in shared memory


def _block(size: int) -> int:
    """Return the largest tile that divides the size."""
    return 128 if size % 128 == 0 else _CONTRACTED


def _rows(size: int) -> int:
    """Return a tile of rows that fits; it need not divide the size."""
    return 128 if size >= 128 else _CONTRACTED


def forward(x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    blocks: dict[str, Any] = {"block_m": _rows(x.shape[0]), "block_n": _block(w.shape[2])}
    return ragged_dot(x, w, group_sizes=group_sizes, **blocks, **_PIPELINE)


def dx(dy: jax.Array, w: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    blocks: dict[str, Any] = {"block_m": _rows(dy.shape[0]), "block_n": _block(w.shape[1])}
    return ragged_dot(dy, w, group_sizes=group_sizes, transpose_rhs=True, **blocks, **_PIPELINE)


def dw(x: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    blocks: dict[str, Any] = {"block_m": _block(x.shape[1]), "block_n": _block(dy.shape[1])}
    return transposed_ragged_dot(x, dy, group_sizes=group_sizes, **blocks, **_PIPELINE)


MOSAIC = Backend("mosaic", refuses, *(unbatched("mosaic", f) for f in (forward, dx, dw)))
