"""Megatron-LM's names for what it offloads, and the residuals that they are here.

Its `--offload-modules` names a module whose input goes to the host; we name the value itself, and of attention all that
its backward pass reads. See
https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/fine_grained_activation_offloading.html
"""

from collections.abc import Mapping
from types import MappingProxyType

# The activation's output, `moe/act`, is the one residual of the experts that no module names alone. `group_mlp`,
# `router_fc1` and `shared_experts` are not in every version of Megatron-LM.
MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_norm": ("layer_input",),
        "qkv_linear": ("attn/norm",),
        "core_attn": ("attn/q", "attn/k", "attn/v", "attn/context"),  # context: with the softmax statistics
        "attn_proj": ("attn/context",),
        "mlp_norm": ("mlp_input",),
        "expert_fc1": ("moe/fc1_input",),
        "moe_act": ("moe/fc1",),
        "fused_group_mlp": ("moe/fc1_input", "moe/fc1", "moe/act"),
        "group_mlp": ("moe/fc1_input", "moe/fc1", "moe/act"),
        "router_fc1": ("moe/router_logits",),
        "shared_experts": ("shared/*",),
    }
)
