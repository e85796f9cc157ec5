"""Grouped GEMMs, which multiply each group of rows by its own matrix, and tensors with a decision per buffer."""

from ._backend import chosen_backend as chosen_backend
from ._interface import GroupedMatmulError as GroupedMatmulError
from ._matmul import grouped_matmul as grouped_matmul
from ._tensor import GroupedTensor as GroupedTensor
