"""A stand-in for what grouped GEMMs use of TransformerEngine 2.20.2, computed by `lax.ragged_dot`, because
TransformerEngine need not be installed. GPU tests check what it has in common with the real one."""

import dataclasses
import enum
import sys
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxoffload.grouped._ragged_fp8 import RAGGED_FP8, from_columns, group_of
from jaxoffload.grouped.ragged import RAGGED

FLOAT = jnp.float32


class ScalingMode(enum.Enum):
    NO_SCALING, CURRENT_TENSOR_SCALING = 1, 2


class TensorUsage(enum.Enum):
    RHS, RHS_TRANS = 2, 3


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class GroupedNoScaleTensor:
    data: Any
    amax: Any
    first_dims: Any
    last_dims: Any
    original_shape: tuple

    def tree_flatten(self):
        return (self.data, self.amax, self.first_dims, self.last_dims), (self.original_shape,)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children, *aux)

    def values(self):
        return self.data


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class GroupedScaledTensor1x(GroupedNoScaleTensor):
    scale_inv: Any
    is_colwise: bool
    data_layout: str
    dq_dtype: Any
    has_rht_applied: bool  # not an argument of the constructor, as in TransformerEngine

    def __init__(self, data, amax, first_dims, last_dims, original_shape, *of_scales):
        super().__init__(data, amax, first_dims, last_dims, original_shape)
        self.scale_inv, self.is_colwise, self.data_layout, self.dq_dtype = of_scales
        self.has_rht_applied = False

    def tree_flatten(self):
        arrays = (self.data, self.amax, self.first_dims, self.last_dims, self.scale_inv)
        return arrays, (self.original_shape, self.is_colwise, self.data_layout, self.dq_dtype)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children[:4], aux[0], children[4], *aux[1:])

    def values(self):
        assert self.data.ndim == 1 and self.data_layout == "NT"[self.is_colwise]
        data = self.data.reshape(self.original_shape)
        if self.first_dims is None:
            return data.astype(FLOAT)
        data = from_columns(data, self.first_dims) if self.is_colwise else data
        place = places(self.first_dims)[group_of(jnp.arange(data.shape[0]), self.first_dims)]
        return data.astype(FLOAT) * self.scale_inv[place][:, None]


def places(sizes):
    """Return each group's index among the groups with rows: TransformerEngine stores nothing for empty groups."""
    return jnp.cumsum(sizes > 0) - 1


def create_1x(data, scale_inv, amax=None, *, scaling_mode, dq_dtype, is_colwise, data_layout, **of_groups):
    assert of_groups["flatten_axis"] == -1 and scaling_mode is ScalingMode.CURRENT_TENSOR_SCALING
    shape = of_groups["original_shape"][:: -1 if data_layout == "T" else 1]
    amax = jnp.empty((1,)) if amax is None else amax
    sizes = of_groups["first_dims"]
    return GroupedScaledTensor1x(data, amax, sizes, None, shape, scale_inv, is_colwise, data_layout, dq_dtype)


class ScaledTensor2x(NamedTuple):
    rowwise_tensor: Any
    colwise_tensor: Any

    def get_tensor(self, usage):
        return self.rowwise_tensor  # of the weights, whose rows are not grouped


class Quantizers(NamedTuple):
    x: Any
    kernel: Any
    dgrad: Any


def create_set(*, scaling_mode, fwd_dtype, bwd_dtype, is_2x2x, n_groups):
    assert is_2x2x and scaling_mode is ScalingMode.CURRENT_TENSOR_SCALING
    return Quantizers(*((dtype, n_groups) for dtype in (fwd_dtype, fwd_dtype, bwd_dtype)))


def grouped_quantize(x, quantizer, group_sizes=None, flatten_axis=-1):
    dtype, groups = quantizer
    mode = {"scaling_mode": ScalingMode.CURRENT_TENSOR_SCALING, "dq_dtype": x.dtype, "flatten_axis": -1}
    if group_sizes is None:
        assert len(x) == groups
        w = RAGGED_FP8.weights(x)[0]
        half = {"is_colwise": False, "data_layout": "N", "first_dims": None, "original_shape": x.shape}
        return ScaledTensor2x(create_1x(w.data.reshape(-1), w.scale_inv, **half, **mode), None)
    assert len(group_sizes) == groups
    q = RAGGED_FP8.quantize(x, group_sizes, dtype)
    place = jnp.where(group_sizes > 0, places(group_sizes), groups)
    scale_inv = jnp.full(groups, jnp.nan).at[place].set(q.scale_inv, mode="drop")  # past them it writes nothing
    mode |= {"first_dims": group_sizes, "original_shape": x.shape}
    return ScaledTensor2x(  # one scale for both, as in TransformerEngine
        create_1x(q.data.reshape(-1), scale_inv, is_colwise=False, data_layout="N", **mode),
        create_1x(q.columnwise_data.reshape(-1), scale_inv, is_colwise=True, data_layout="T", **mode),
    )


def grouped_gemm(lhs, rhs, contracting_dims):
    """V1 returns garbage unless the sizes add up to the rows; V2 ignores the rows past all groups."""
    dtype = getattr(lhs, "dq_dtype", lhs.data.dtype)
    x, w = lhs.values(), rhs.values()
    if contracting_dims == ((0,), (0,)):
        assert getattr(lhs, "is_colwise", True) and getattr(rhs, "is_colwise", True)
        rows = lambda y: y.astype(FLOAT)
        out = RAGGED.dw(rows(x), rows(w), lhs.first_dims)
    else:
        assert rhs.first_dims is None and not getattr(lhs, "is_colwise", False)
        w = {((1,), (1,)): w, ((1,), (2,)): w.swapaxes(1, 2)}[contracting_dims]
        if hasattr(rhs, "scale_inv"):  # here too, empty groups of the other operand have no entry
            w = w.astype(FLOAT) * rhs.scale_inv[places(lhs.first_dims)][:, None, None]
        out = RAGGED.forward(x.astype(FLOAT), w.astype(FLOAT), lhs.first_dims)
    total = jnp.sum(lhs.first_dims)
    if not extensions().is_v2_grouped_gemm_supported(ScalingMode.NO_SCALING, x.dtype, False)[0]:
        return jnp.where(total == x.shape[0], out, jnp.nan).astype(dtype)
    assert not any(size % 8 for size in (*x.shape[1:], *out.shape[-1:]))
    left_out = (jnp.arange(x.shape[0]) >= total)[:, None] if contracting_dims != ((0,), (0,)) else False
    return jnp.where(left_out, jnp.nan, out).astype(dtype)


def extensions():
    return sys.modules["transformer_engine.jax.cpp_extensions"]


def install(monkeypatch):
    """Replace TransformerEngine for one test; return a function that chooses its kernels, which starts with V1."""
    names = ("transformer_engine", "transformer_engine.jax", "transformer_engine.jax.quantize")
    for name in (*names, "transformer_engine.jax.cpp_extensions", "transformer_engine_jax"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    quantize = sys.modules["transformer_engine.jax.quantize"]
    for thing in (GroupedNoScaleTensor, GroupedScaledTensor1x, ScalingMode, TensorUsage):
        setattr(quantize, thing.__name__, thing)
    quantize.ScaledTensorFactory = types.SimpleNamespace(create_1x=create_1x)
    quantize.QuantizerFactory = types.SimpleNamespace(create_set=create_set)
    extensions().grouped_gemm, extensions().grouped_quantize = grouped_gemm, grouped_quantize

    def choose(v2, cublas=130802):
        takes_v2 = lambda mode, dtype, has_bias: v2 and (mode, dtype) == (ScalingMode.NO_SCALING, jnp.bfloat16)
        extensions().is_v2_grouped_gemm_supported = lambda *args: (takes_v2(*args), "")
        sys.modules["transformer_engine_jax"].get_cublasLt_version = lambda: cublas

    choose(v2=False)
    return choose
