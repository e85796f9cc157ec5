"""Megatron-LM's names for what it offloads, and the patterns that they stand for here.

Its `--offload-modules` names a module whose input goes to the host; we name the value itself, and for attention all
that its backward pass reads. See
https://docs.nvidia.com/megatron-core/developer-guide/latest/user-guide/features/fine_grained_activation_offloading.html
"""

from collections.abc import Mapping

# `group_mlp`, `router_fc1`, `router_fc2` and `shared_experts` are not in every version of Megatron-LM. `router_fc1` and
# `router_fc2` are not the router's: in a public port (dcu_megatron) they are the two layers of the TEGroupedMLP, where
# `_offload_router_fc1_forward(permuted_local_hidden_states, ...)` offloads what the first one reads.
MODULES: Mapping[str, tuple[str, ...]] = {
    "attn_norm": ("layer_input",),
    "qkv_linear": ("attn/norm",),
    "core_attn": ("attn/q", "attn/k", "attn/v", "attn/context"),  # context: with the softmax statistics
    "attn_proj": ("attn/context",),
    "mlp_norm": ("mlp_input",),
    "expert_fc1": ("moe/fc1_input",),
    "moe_act": ("moe/fc1",),
    "fused_group_mlp": ("moe/fc1_input", "moe/fc1", "moe/act"),
    "group_mlp": ("moe/fc1_input", "moe/fc1", "moe/act"),
    "router_fc1": ("moe/fc1_input",),
    "router_fc2": ("moe/act",),
    "shared_experts": ("shared/*",),
}
