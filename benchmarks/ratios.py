"""Ratios between the measured modes, and how much of the cost of recomputation offload saves."""

import argparse
from typing import Any

from benchmarks.cases import Case

NEEDED = {"remat", "saved", "saved_all", "ours", "ours_saved", "ours_saved_context", "ours_saved_all", "ours_best"}
RATIOS = (
    ("ours", "saved"),
    ("remat", "ours"),
    ("remat", "ours_best"),
    ("jax_offload", "ours"),
    ("jax_offload_tuned", "ours"),
    ("remat", "saved"),
    ("jax_offload", "saved"),
    ("jax_offload", "remat"),
    ("jax_offload_tuned", "saved"),
    ("jax_offload_tuned", "remat"),
)


def ratios(case: Case, modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return every ratio for which the modes were measured."""
    step = {mode: result["step_ms"] for mode, result in modes.items()}
    found = {f"{a}/{b}": round(step[a] / step[b], 4) for a, b in RATIOS if {a, b} <= step.keys()}
    if step.keys() >= {"remat", "saved_all", "ours_saved_all", "ours_best"}:
        found |= won_back(modes)
    return found | (shares(case, modes, options) if step.keys() >= NEEDED else {})


def won_back(modes: dict[str, Any]) -> dict[str, float]:
    """Return the share of recomputation's time that offload wins back without more memory, and the memory's ratios."""
    ms = {mode: m["step_ms"] for mode, m in modes.items()}
    won = ms["remat"] - ms["ours_best"]
    found = {
        # JAX's own policies cannot save all that cuDNN's attention needs: its forward pass is always recomputed.
        "won_back": won / (ms["remat"] - min(ms["saved_all"], ms["ours_saved_all"])),
    }
    for key in ("temp_gib", "peak_gib"):
        if key in modes["remat"] and key in modes["ours_best"]:
            found[f"ours_best/remat by {key}"] = modes["ours_best"][key] / modes["remat"][key]
    gain = ms["remat"] - ms["saved_all"]
    if gain > 0.01 * ms["remat"]:  # with experts, JAX's gain can be as small as the variation between steps
        found["won_back against JAX's saved_all"] = won / gain
    return {name: round(ratio, 4) for name, ratio in found.items()}


def shares(case: Case, modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return `won_back` and its limit, which the bus sets, the device bytes that offload frees, and exposed copies.

    `freed/predicted` compares with the stacks less two rows: at the peak one layer reads its row while the next row
    arrives. `freed/most` compares with the stacks less one row: the layer has finished with its own.
    """
    ours, saved = modes["ours"], modes["ours_saved"]
    found = {**won_back(modes), "compile_ours/compile_scan": ours["compile_s"] / modes["saved"]["compile_s"]}
    on_host = ours["residuals_host_gib"] / options.fsdp / options.expert  # per device
    row = on_host / options.layers
    if on_host > 2 * row:
        for key in ("temp_gib", "peak_gib") if "peak_gib" in ours and "peak_gib" in saved else ("temp_gib",):
            found[f"freed/predicted by {key}"] = (saved[key] - ours[key]) / (on_host - 2 * row)
            found[f"freed/most by {key}"] = (saved[key] - ours[key]) / (on_host - row)
    if profile := ours.get("profile"):
        found["exposed/copies"] = profile["exposed_ms"] / profile["copies_ms"]
        found["exposed/step"] = profile["exposed_ms"] / profile["step_ms"]
        bytes_per_ms = 2 * on_host * (options.layers - 1) / options.layers * 2**30 / profile["copies_ms"]
        found["won_back_limit"] = won_back_limit(case, options, modes, bytes_per_ms)
        found["won_back/won_back_limit"] = found["won_back"] / found["won_back_limit"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def won_back_limit(case: Case, options: argparse.Namespace, modes: dict[str, Any], bytes_per_ms: float) -> float:
    """Estimate the largest share of recomputation's time that offload can win back, given the bus and the device.

    Every layer offloads `layer_input`, and then the residuals that take longest to recompute per byte, the last of them
    in part. It offloads until the copies take as long as its forward pass, and then saves until the device is as full
    as with full recomputation. The times are measured: attention's is what its recomputation costs (ours_saved -
    ours_saved_context), and the rest of recomputation's time is shared among the matmuls by their FLOPs. More can be
    won where partly exposed copies cost less than recomputation.
    """
    ms = {mode: m["step_ms"] for mode, m in modes.items()}
    gib = {mode: m["temp_gib"] for mode, m in modes.items()}
    fastest = min(ms["saved_all"], ms["ours_saved_all"])
    forward_ms = fastest / options.layers / 3
    sizes = {name: size / options.fsdp / options.expert for name, (_, size) in case.costs(options).items()}
    room = max(0.0, forward_ms * bytes_per_ms - sizes.pop("layer_input"))
    room += max(0.0, gib["remat"] - gib["ours"]) * 2**30 / options.layers

    flops = {name: count for name, (count, _) in case.costs(options).items()}
    recomputing = (ms["remat"] - fastest) / options.layers
    attention = max(0.0, ms["ours_saved"] - ms["ours_saved_context"]) / options.layers
    ms_per_flop = max(0.0, recomputing - attention) / sum(flops.values())
    costs = {name: count * ms_per_flop for name, count in flops.items()} | {"attn/context": attention}
    won = 0.0
    for name in sorted(sizes, key=lambda name: sizes[name] / max(costs[name], 1e-9)):
        fraction = min(1.0, max(0.0, room / sizes[name]))
        won, room = won + fraction * costs[name], room - fraction * sizes[name]
    return won / sum(costs.values())
