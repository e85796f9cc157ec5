"""What follows from measured steps: the ratios between the peers, and the shares of what recomputation costs."""

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
    """All that these modes allow."""
    step = {mode: result["step_ms"] for mode, result in modes.items()}
    found = {f"{a}/{b}": round(step[a] / step[b], 4) for a, b in RATIOS if {a, b} <= step.keys()}
    if step.keys() >= {"remat", "saved_all", "ours_saved_all", "ours_best"}:
        found |= won_back(modes)
    return found | (shares(case, modes, options) if step.keys() >= NEEDED else {})


def won_back(modes: dict[str, Any]) -> dict[str, float]:
    """Of the time that recomputation costs, what offload wins back at no more memory."""
    ms = {mode: m["step_ms"] for mode, m in modes.items()}
    won = ms["remat"] - ms["ours_best"]
    found = {
        # JAX's own policies cannot keep all of cuDNN's attention: with all names saved its forward pass runs again.
        "won_back": won / (ms["remat"] - min(ms["saved_all"], ms["ours_saved_all"])),
    }
    for key in ("temp_gib", "peak_gib"):
        if key in modes["remat"] and key in modes["ours_best"]:
            found[f"ours_best/remat by {key}"] = modes["ours_best"][key] / modes["remat"][key]
    jaxs = ms["remat"] - ms["saved_all"]
    if jaxs > 0.01 * ms["remat"]:  # with experts JAX may gain no more than steps differ by themselves
        found["won_back against JAX's saved_all"] = won / jaxs
    return {name: round(ratio, 4) for name, ratio in found.items()}


def shares(case: Case, modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """`won_back` and its limit, which is the bus's. `freed/predicted`: device bytes, against saving, where
    memory is fullest while the layer in turn still needs all that has come back for it; `freed/most`: where it needs
    none of that any more. `exposed`: copies that nothing hides."""
    ours, reference = modes["ours"], modes["ours_saved"]
    found = {**won_back(modes), "compile_ours/compile_scan": ours["compile_s"] / modes["saved"]["compile_s"]}
    on_host = ours["residuals_host_gib"] / options.fsdp / options.expert  # of a device
    # Of the rows of the stacks one is on its way to the device, and another there, for the layer in turn.
    row = on_host / options.layers
    if on_host > 2 * row:
        for key in ("temp_gib", "peak_gib") if "peak_gib" in ours and "peak_gib" in reference else ("temp_gib",):
            found[f"freed/predicted by {key}"] = (reference[key] - ours[key]) / (on_host - 2 * row)
            found[f"freed/most by {key}"] = (reference[key] - ours[key]) / (on_host - row)
    if profile := ours.get("profile"):
        found["exposed/copies"] = profile["exposed_ms"] / profile["copies_ms"]
        found["exposed/step"] = profile["exposed_ms"] / profile["step_ms"]
        rate = 2 * on_host * (options.layers - 1) / options.layers * 2**30 / profile["copies_ms"]
        found["won_back_limit"] = won_back_limit(case, options, modes, rate)
        found["won_back/won_back_limit"] = found["won_back"] / found["won_back_limit"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def won_back_limit(case: Case, options: argparse.Namespace, modes: dict[str, Any], bytes_a_ms: float) -> float:
    """The share of recomputation's cost that bus and device let offload win back. An estimate: more can be won where
    copies that are not all hidden still cost less than computing again.

    Of each layer `layer_input` moves, and then the residuals that take the longest to compute again per byte, a part of
    the last of them: until the copies take as long as the layer's forward pass, and then on the device, until it is as
    full as with recomputation. Times are measured: of attention, by what its second run costs (ours_saved -
    ours_saved_context); of products, what is left of recomputation's cost, by their FLOPs.
    """
    ms = {mode: m["step_ms"] for mode, m in modes.items()}
    flops = {name: count for name, (count, _) in case.costs(options).items()}
    size = {name: count / options.fsdp / options.expert for name, (_, count) in case.costs(options).items()}
    all_of_it = (ms["remat"] - min(ms["saved_all"], ms["ours_saved_all"])) / options.layers
    attention = max(0.0, ms["ours_saved"] - ms["ours_saved_context"]) / options.layers
    a_flop = max(0.0, all_of_it - attention) / sum(flops.values())
    cost = {name: count * a_flop for name, count in flops.items()} | {"attn/context": attention}
    forward_ms = min(ms["saved_all"], ms["ours_saved_all"]) / options.layers / 3
    spare_gib = max(0.0, modes["remat"]["temp_gib"] - modes["ours"]["temp_gib"])
    room = max(0.0, forward_ms * bytes_a_ms - size.pop("layer_input")) + spare_gib * 2**30 / options.layers
    won = 0.0
    for name in sorted(size, key=lambda name: size[name] / max(cost[name], 1e-9)):
        part = min(1.0, max(0.0, room / size[name]))
        won, room = won + part * cost[name], room - part * size[name]
    return won / sum(cost.values())
