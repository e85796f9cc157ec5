"""A mixture of experts: each token goes through k of E MLPs, none dropped; on devices that share tokens and experts.

    norm -> router_logits -> routing -> fc1_input -> fc1 -> act -> fc2 -> each token's sum
                                           |                          |
                                     (to the experts'         (and back, where an
                                      devices)                  expert axis has several)

The scores multiply `act`, not the outputs: then fc2's output is of no use to the backward pass, and need not be kept.
Gate and up are two grouped GEMMs: each needs a decision of its own, for which the halves of one result would be copied
(benchmarks/choices.py measures both).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxoffload import grouped_matmul, scope, tag
from jaxoffload.grouped import te
from models import exchange, routing
from models.config import Config, Model
from models.layers import RMSNorm, weight
from models.mlp import FeedForward, activate, first_leaves
from models.routing import Balance
from models.sharding import RULES

ALIGN = {None: 1, "fp8": te.FP8_MULTIPLE}  # of the rows of each expert, by `model.quantize`


class MoE(nnx.Module):
    """Residuals: moe/norm, moe/router_logits, moe/routing.*, moe/fc1_input, moe/fc1.gate, moe/fc1.up, moe/act, moe/fc2;
    of shared experts shared/fc1.gate, shared/fc1.up, shared/act, shared/fc2. With FP8, moe/fc1_input and moe/act are
    quantised: moe/act.data, moe/act.scale_inv, moe/act.columnwise_data, moe/act.columnwise_scale_inv. Where experts are
    on devices of their own, moe/fc1_input.weight comes with the rows: what each is multiplied by in moe/act."""

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
        own = {leaf: getattr(self, f"{leaf}_ExDxF").astype(dtype) for leaf in first_leaves(self.config.activation)}
        own |= {"down": self.down_ExFxD.astype(dtype), "router": self.router_DxE[...]}
        own |= {"bias": self.bias_E[...]} if self.config.balance_rate else {}
        if mesh.empty:
            out_BxSxD, balance = experts(self.config, {}, norm_BxSxD, own)
        else:
            stream, wide = RULES.spec("batch", "sequence", "residual"), RULES.spec("experts", None, "mlp")
            specs = {name: wide if name in ("gate", "up") else PartitionSpec() for name in own}
            specs["down"] = RULES.spec("experts", "mlp", None)
            of_a_device = functools.partial(experts, self.config, dict(mesh.shape))
            # Kernels do not say over which axes their results vary.
            out_BxSxD, balance = jax.shard_map(
                of_a_device,
                in_specs=(stream, specs),
                out_specs=(stream, Balance(*(PartitionSpec() for _ in Balance._fields))),
                check_vma=False,
            )(norm_BxSxD, own)
        if self.config.shared_experts:
            out_BxSxD += self.shared.feed(norm_BxSxD, "shared")
        return out_BxSxD, balance


def experts(
    config: Model, sizes: dict[str, int], x_BxSxD: jax.Array, own: dict[str, jax.Array]
) -> tuple[jax.Array, Balance]:
    """The experts' part of the layer on one device, which holds its tokens and its experts.

    Args:
      sizes: of the mesh's axes; empty outside of a mesh.
      x_BxSxD: normalised, this device's.
      own: router (D, E); bias (E,) if there is one; gate and up (L, D, F) and down (L, F, D) of the L experts here, a
        part of F where there is a tensor axis.
    """
    B, S, D = x_BxSxD.shape
    x_TxD = x_BxSxD.reshape(B * S, D)
    batch_axes = tuple(axis for axis in RULES.batch if axis in sizes)
    with scope("moe"):
        logits_TxE = tag(_router_logits(x_TxD, own["router"]), "router_logits")
        scores_TxE = routing.scores(logits_TxE, config.router)
        parts, align = sizes.get("expert", 1), ALIGN[config.quantize]
        # Aligned where the grouped GEMMs run: here, or where the rows arrive.
        chosen = routing.choose(scores_TxE, own.get("bias"), config.experts_per_token, align if parts == 1 else 1)
        weight_Txk = routing.weights(scores_TxE, chosen, config.renormalize, config.route_scale)
        # In the order of the rows; each is one token's, for one expert.
        weight_Rx1 = routing.moved(weight_Txk.reshape(-1, 1), chosen.order_R, chosen.place_Tk)
        rows_RxD, dropped = routing.dispatch(x_TxD, chosen), jnp.int32(0)
        if parts > 1:
            rows_RxD, dropped = _apply_remote_experts(config, rows_RxD, weight_Rx1, chosen.sizes_E, own, parts)
        else:
            sizes_E = routing.aligned(chosen.sizes_E, align)
            rows_RxD = _apply_experts(config, rows_RxD, weight_Rx1, sizes_E, own, full=align == 1)
        out_TxD = routing.combine(rows_RxD, chosen)
        if sizes.get("tensor", 1) > 1:  # each device had a part of F
            out_TxD = lax.psum(out_TxD, "tensor")
        balance = routing.balance(logits_TxE, scores_TxE, chosen, dropped, batch_axes)
    return out_TxD.reshape(B, S, D), balance


def _apply_experts(
    config: Model,
    rows_RxD: jax.Array,
    weight_Rx1: jax.Array,
    sizes_L: jax.Array,
    own: dict[str, jax.Array],
    full: bool,
) -> jax.Array:
    """(R, D): what the experts here make of their rows, which are sorted by expert, times each row's weight. `full`:
    all R are some expert's."""
    how: dict[str, Any] = {"backend": config.grouped, "quantize": config.quantize, "full": full}
    gemm = functools.partial(grouped_matmul, group_sizes=sizes_L, **how)
    leaves = first_leaves(config.activation)
    fc1 = gemm(rows_RxD, [own[leaf] for leaf in leaves], name="fc1_input")
    fc1 = tag(dict(zip(leaves, fc1, strict=True)), "fc1")
    act_RxF = activate(fc1, config.activation).astype(jnp.float32) * weight_Rx1
    return tag(gemm(act_RxF.astype(rows_RxD.dtype), own["down"], name="act"), "fc2")


def _apply_remote_experts(
    config: Model,
    rows_RxD: jax.Array,
    weight_Rx1: jax.Array,
    sizes_E: jax.Array,
    own: dict[str, jax.Array],
    parts: int,
) -> tuple[jax.Array, jax.Array]:
    """`_computed` by the `parts` devices that hold the experts, this one among them; and how many rows are dropped."""
    R = len(rows_RxD)
    room = exchange.capacity_rows(R, parts, config.capacity)
    route = exchange.Route(R, parts, room, "expert", ALIGN[config.quantize], ragged=config.exchange == "ragged")
    sent, dropped = exchange.make_exchange(sizes_E, route)
    there_SxD, weight_Sx1 = (exchange.to_experts(x, sent, parts, "expert") for x in (rows_RxD, weight_Rx1))
    # Kept as the rows are that they belong to, or they would be sent once more in the backward pass.
    weight_Sx1 = tag({"weight": weight_Sx1}, "fc1_input")["weight"]
    computed_SxD = _apply_experts(config, there_SxD, weight_Sx1, sent.sizes_L, own, full=False)
    return exchange.from_experts(computed_SxD, sent, R, parts, "expert"), dropped


def grouped_gemms(config: Config) -> list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """Abstract x (R, K) and w (L, K, N) of fc1 and of fc2, as each device has them in a microbatch."""
    model, mesh, train = config.model, config.mesh, config.train
    share = train.batch_size // train.grad_accumulation // (mesh.data * mesh.fsdp * mesh.expert)
    rows = share * train.seq_len * model.experts_per_token
    if mesh.expert > 1:
        rows = mesh.expert * exchange.capacity_rows(rows, mesh.expert, model.capacity)
    L, D, F = model.experts // mesh.expert, model.d_model, model.d_expert // mesh.tensor
    rows = routing.aligned_rows(rows, L, ALIGN[model.quantize])
    of = lambda *shape: jax.ShapeDtypeStruct(shape, model.dtype)
    return [(of(rows, K), of(L, K, N)) for K, N in ((D, F), (F, D))]


def _router_logits(x_TxD: jax.Array, router_DxE: jax.Array) -> jax.Array:
    # GPUs would round float32 to TF32's 10 bits.
    return jnp.matmul(x_TxD.astype(jnp.float32), router_DxE, precision=lax.Precision.HIGHEST)


def balanced(params: nnx.State, load_LxE: jax.Array, rate: float) -> nnx.State:
    """Parameters with each expert's bias a step towards an even load (Wang et al., "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts", 2024). `load_LxE`: each layer's shares of the rows."""

    def step(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        if not any(getattr(key, "key", None) == "bias_E" for key in path):
            return leaf
        return leaf + rate * jnp.sign(1 / load_LxE.shape[-1] - load_LxE)

    return jax.tree_util.tree_map_with_path(step, params)
