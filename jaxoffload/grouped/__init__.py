"""Grouped GEMMs, each group of rows with a matrix of its own, and tensors whose every buffer can be steered."""

from . import _jax_float8_fix as _jax_float8_fix  # registers a lowering
from ._backend import GroupedMatmulError as GroupedMatmulError
from ._matmul import chosen_backend as chosen_backend
from ._matmul import grouped_matmul as grouped_matmul
from ._tensor import GroupedTensor as GroupedTensor
