"""A mixture of experts: each token passes k of E MLPs; tokens and experts can be split over devices.

    norm -> router_logits -> routing -> fc1_input -> fc1 -> act -> fc2 -> each token's sum
                                           |                          |
                                     (to the experts'           (and back; both only
                                      devices)                   with an expert axis)

The scores multiply `act`, not the outputs: the backward pass then does not need the output of fc2. Gate and up are two
grouped GEMMs, because each has a decision of its own; the halves of one result would be copied for that
(benchmarks/results/choices.json).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxoffload import scope, tag
from jaxoffload.grouped import grouped_matmul, te
from models import exchange, routing
from models.config import Config, Model
from models.layers import RMSNorm, weight
from models.mlp import FeedForward, activate, first_leaves
from models.routing import Balance
from models.sharding import RULES, on_each_device

ALIGN = {None: 1, "fp8": te.FP8_MULTIPLE}  # `model.quantize` -> each expert's rows are padded to a multiple of this


class MoE(nnx.Module):
    """A layer of experts; returns its output and its Balance.

    Residuals: moe/norm, moe/router_logits, moe/routing.*, moe/fc1_input, moe/fc1.gate, moe/fc1.up, moe/act, moe/fc2.
    Shared experts have shared/fc1.gate, shared/fc1.up, shared/act, shared/fc2. With FP8, moe/fc1_input and moe/act are
    quantised, as in moe/act.data, moe/act.scale_inv, moe/act.columnwise_data, moe/act.columnwise_scale_inv. With an
    expert axis there is moe/fc1_input.weight too, which is sent with the rows: the factor of each in moe/act.
    """

    def __init__(self, config: Model, rngs: nnx.Rngs):
        D, E, F = config.d_model, config.experts, config.d_expert
        self.config = config
        self.norm = RMSNorm(D, config.norm_eps)
        self.router_DxE = weight(rngs, (D, E), ("residual", "router"), D**-0.5)
        if config.balance_rate:
            self.bias_E = nnx.Param(jnp.zeros(E, jnp.float32), axes=("router",))
        for leaf in first_leaves(config.activation):
            setattr(self, f"{leaf}_ExDxF", weight(rngs, (E, D, F), ("experts", "expert_embed", "mlp"), D**-0.5))
        self.down_ExFxD = weight(rngs, (E, F, D), ("experts", "mlp", "expert_embed"), (2 * config.layers * F) ** -0.5)
        if config.shared_experts:
            self.shared = FeedForward(config, rngs, config.shared_experts * F)

    def __call__(self, x_BxSxD: jax.Array) -> tuple[jax.Array, Balance]:
        norm_BxSxD, dtype = tag(self.norm(x_BxSxD), "moe/norm"), x_BxSxD.dtype
        mesh = jax.sharding.get_abstract_mesh()
        # Rounded before they are gathered, which halves what is sent; the router is float32.
        weights = {leaf: getattr(self, f"{leaf}_ExDxF").astype(dtype) for leaf in first_leaves(self.config.activation)}
        weights |= {"down": self.down_ExFxD.astype(dtype), "router": self.router_DxE[...]}
        weights |= {"bias": self.bias_E[...]} if self.config.balance_rate else {}
        if mesh.empty:
            out_BxSxD, balance = experts(self.config, {}, norm_BxSxD, weights)
        else:
            stream, wide = RULES.spec("batch", "sequence", "residual"), RULES.spec("experts", None, "mlp")
            specs = {name: wide if name in ("gate", "up") else PartitionSpec() for name in weights}
            specs["down"] = RULES.spec("experts", "mlp", None)
            on_device = functools.partial(experts, self.config, dict(mesh.shape))
            out_specs = stream, Balance(*(PartitionSpec() for _ in Balance._fields))
            out_BxSxD, balance = on_each_device(on_device, (stream, specs), out_specs)(norm_BxSxD, weights)
        if self.config.shared_experts:
            out_BxSxD += self.shared.feed(norm_BxSxD, "shared")
        return out_BxSxD, balance


def experts(
    config: Model, sizes: dict[str, int], x_BxSxD: jax.Array, weights: dict[str, jax.Array]
) -> tuple[jax.Array, Balance]:
    """Compute the routed experts of a layer on one device, which has its tokens and its experts.

    Args:
      config: the model's.
      sizes: the size of each mesh axis; empty without a mesh.
      x_BxSxD: the normalised tokens of this device.
      weights: router (D, E), and bias (E,) if there is one; gate and up (L, D, F) and down (L, F, D) of the L experts
        of this device, with a part of F if there is a tensor axis.

    Returns:
      (B, S, D), and the balance over all devices.
    """
    B, S, D = x_BxSxD.shape
    x_TxD = x_BxSxD.reshape(B * S, D)
    batch_axes = tuple(axis for axis in RULES.batch if axis in sizes)
    with scope("moe"):
        logits_TxE = tag(_router_logits(x_TxD, weights["router"]), "router_logits")
        scores_TxE = routing.scores(logits_TxE, config.router)
        parts, align = sizes.get("expert", 1), ALIGN[config.quantize]
        # Aligned on the device that runs the grouped GEMMs: this one, or the one that the rows are sent to.
        chosen = routing.choose(scores_TxE, weights.get("bias"), config.experts_per_token, align if parts == 1 else 1)
        weight_Txk = routing.weights(scores_TxE, chosen, config.renormalize, config.route_scale)
        # A row is one token for one expert.
        weight_Rx1 = routing.moved(weight_Txk.reshape(-1, 1), chosen.order_R, chosen.place_Tk)
        rows_RxD, dropped = routing.dispatch(x_TxD, chosen), jnp.int32(0)
        if parts > 1:
            rows_RxD, dropped = _apply_remote_experts(config, rows_RxD, weight_Rx1, chosen.sizes_E, weights, parts)
        else:
            sizes_E = routing.aligned(chosen.sizes_E, align)
            rows_RxD = _apply_experts(config, rows_RxD, weight_Rx1, sizes_E, weights, full=align == 1)
        out_TxD = routing.combine(rows_RxD, chosen)
        if sizes.get("tensor", 1) > 1:  # each device has a part of F
            out_TxD = lax.psum(out_TxD, "tensor")
        balance = routing.balance(logits_TxE, scores_TxE, chosen, dropped, batch_axes)
    return out_TxD.reshape(B, S, D), balance


def _apply_experts(
    config: Model,
    rows_RxD: jax.Array,
    weight_Rx1: jax.Array,
    sizes_L: jax.Array,
    weights: dict[str, jax.Array],
    full: bool,
) -> jax.Array:
    """Return (R, D): the experts' outputs, each times the weight of its row.

    The rows are sorted by expert; expert l has sizes_L[l]. `full`: every row belongs to an expert.
    """
    how: dict[str, Any] = {"backend": config.grouped, "quantize": config.quantize, "full": full}
    gemm = functools.partial(grouped_matmul, group_sizes=sizes_L, **how)
    leaves = first_leaves(config.activation)
    fc1 = gemm(rows_RxD, [weights[leaf] for leaf in leaves], name="fc1_input")
    fc1 = tag(dict(zip(leaves, fc1, strict=True)), "fc1")
    act_RxF = activate(fc1, config.activation).astype(jnp.float32) * weight_Rx1
    return tag(gemm(act_RxF.astype(rows_RxD.dtype), weights["down"], name="act"), "fc2")


def _apply_remote_experts(
    config: Model,
    rows_RxD: jax.Array,
    weight_Rx1: jax.Array,
    sizes_E: jax.Array,
    weights: dict[str, jax.Array],
    parts: int,
) -> tuple[jax.Array, jax.Array]:
    """As `_apply_experts`, but on the `parts` devices that have the experts; return the number of dropped rows, too."""
    R = len(rows_RxD)
    room = exchange.capacity_rows(R, parts, config.capacity)
    route = exchange.Route(R, parts, room, "expert", ALIGN[config.quantize], ragged=config.exchange == "ragged")
    sent, dropped = exchange.make_exchange(sizes_E, route)
    there_SxD, weight_Sx1 = (exchange.to_experts(x, sent, parts, "expert") for x in (rows_RxD, weight_Rx1))
    # A leaf of fc1_input, so that it is kept if the rows are; otherwise it is sent again in the backward pass.
    weight_Sx1 = tag({"weight": weight_Sx1}, "fc1_input")["weight"]
    computed_SxD = _apply_experts(config, there_SxD, weight_Sx1, sent.sizes_L, weights, full=False)
    return exchange.from_experts(computed_SxD, sent, R, parts, "expert"), dropped


def grouped_gemms(config: Config) -> list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Return abstract x (R, K) and w (L, K, N) of fc1 and of fc2, per device and microbatch."""
    model, mesh, train = config.model, config.mesh, config.train
    share = train.batch_size // train.grad_accumulation // (mesh.data * mesh.fsdp * mesh.expert)
    rows = share * train.seq_len * model.experts_per_token
    if mesh.expert > 1:
        rows = mesh.expert * exchange.capacity_rows(rows, mesh.expert, model.capacity)
    L, D, F = model.experts // mesh.expert, model.d_model, model.d_expert // mesh.tensor
    rows = routing.aligned_rows(rows, L, ALIGN[model.quantize])
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, model.dtype)
    return [(abstract(rows, K), abstract(L, K, N)) for K, N in ((D, F), (F, D))]


def _router_logits(x_TxD: jax.Array, router_DxE: jax.Array) -> jax.Array:
    # GPUs would round float32 to TF32's 10 bits.
    return jnp.matmul(x_TxD.astype(jnp.float32), router_DxE, precision=lax.Precision.HIGHEST)


def balanced(params: nnx.State, load_LxE: jax.Array, rate: float) -> nnx.State:
    """Return the parameters, with each expert's bias one step of `rate` towards an even load.

    `load_LxE`: each expert's share of the rows of its layer; in the parameters layers may be grouped. Wang et al.,
    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.
    """

    def step(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if not any(getattr(key, "key", None) == "bias_E" for key in path):
            return leaf
        return leaf + rate * jnp.sign(1 / load_LxE.shape[-1] - load_LxE).reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(step, params)
