"""Step time and device memory as more residuals per layer are offloaded, and as more layers offload.

    python -m benchmarks.sweep [--out benchmarks/results/sweep.json] [--layers 16 --batch 2 --seqs 2048 8192]
    python -m benchmarks.sweep --plot benchmarks/results/sweep.json    # only draws the picture beside that file

The residuals of `benchmarks.dense`'s layer are offloaded one after another, those first that take longest to recompute
per byte; the others are recomputed. Then a share of the layers offloads the first three, and the other layers save
them. Offload is free until a layer's copies take as long as its forward pass; a trace in the same run measures the
bandwidth for that.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import bench, dense
from benchmarks.bench import Variant
from benchmarks.cases import PIPELINED, SIZES, group_of, ours, shape_of

ORDER = (
    *("layer_input", "attn/context", "mlp/fc1.gate", "attn/q", "attn/k", "attn/v"),
    *("mlp_input", "mlp/fc1.up", "mlp/act"),
)
RECOMPUTED, SHARE = "everything recomputed", "jaxoffload, in a share of the layers"
COLOURS = {"JAX": "tab:red", "jaxoffload": "tab:blue", SHARE: "tab:green"}
SMALL = {"fontsize": 7, "va": "top", "ha": "left", "rotation_mode": "anchor"}


def parse() -> argparse.Namespace:
    more = {"rounds": 0, "seqs": [2048, 8192], "hows": [*COLOURS], "plot": ""}
    return bench.parser(__doc__, "sweep", **SIZES, **more).parse_args()


def variants() -> Iterator[tuple[str, Variant]]:
    """Yield full recomputation, each set of residuals with each series, and each share of the layers."""
    yield RECOMPUTED, Variant("jax in scan", {}, {})
    for number in range(len(ORDER)):
        residuals = dict.fromkeys(ORDER[: number + 1], "offload")
        yield "jaxoffload", ours(residuals)
        yield "JAX", Variant("jax in scan", residuals, PIPELINED)
    for share in (0.25, 0.5, 0.75):
        yield SHARE, ours(dict.fromkeys(ORDER[:3], "offload"), offload_layers=share)


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    wanted = [(how, variant) for how, variant in variants() if how in (RECOMPUTED, *options.hows)]
    each = {(f"{n}, {how}", ""): variant for n, (how, variant) in enumerate(wanted)}
    options.profile = [mode for (mode, _), variant in each.items() if variant.peer == "ours"]
    for seq in options.seqs:
        of_seq = argparse.Namespace(**vars(options) | {"seq": seq})
        group = group_of(dense.CASE, of_seq, each, ("seq", str(seq)))
        for (how, variant), step in zip(wanted, group.steps.values(), strict=True):
            step.facts.update(how=how, moved=list(variant.residuals))
        yield group


def lines_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of what ran."""
    return [of for of in found["modes"].values() if "step_ms" in of]


def recomputed(lines: list[dict[str, Any]]) -> dict[str, Any]:
    return next(line for line in lines if line["how"] == RECOMPUTED)


def free_gib(lines: list[dict[str, Any]]) -> float | None:
    """Return the GiB whose copies take as long as the forward pass, a quarter of the step that recomputes everything;
    None if no line has the time of copies."""
    rates = [line["host_gib"] / line["profile"]["d2h_ms"] for line in lines if "profile" in line]
    return recomputed(lines)["step_ms"] / 4 * statistics.median(rates) if rates else None


def plot(result: dict[str, Any], path: Path) -> str:
    """Draw step times above and memory below, with a column per sequence length; return the path written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = result["shape"]
    seqs = sorted(map(int, result["seq"]))
    figure, axes = plt.subplots(2, len(seqs), figsize=(2.4 + 4.8 * len(seqs), 7.2), sharex="col", squeeze=False)
    for column, seq in enumerate(seqs):
        lines = lines_of(result["seq"][str(seq)])
        top, bottom = axes[:, column]
        draw(top, lines, "step_ms", "step, ms")
        draw(bottom, lines, "temp_gib", "device memory of the step, GiB")
        for line in (line for line in lines if line["how"] == "jaxoffload"):
            at = line["host_gib"], line["step_ms"]
            top.annotate(line["moved"][-1], at, (0, -8), textcoords="offset points", rotation=-60, **SMALL)
        top.set_title(f"{shape['batch']} x {seq} tokens")
        bottom.set_xlabel("on the host, GiB")
    axes[1][0].legend(fontsize="small", loc="lower right")
    layers = f"{shape['layers']} layers of Llama 3's shape, width {shape['d_model']}, on {result['device']}"
    figure.suptitle(f"One residual after another goes to the host\n{layers}", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return str(path)


def draw(ax: Any, lines: list[dict[str, Any]], key: str, label: str) -> None:
    """Draw one quantity of each series against the GiB on the host."""
    for how, colour in COLOURS.items():
        if series := [line for line in lines if line["how"] == how]:
            ax.plot([s["host_gib"] for s in series], [s[key] for s in series], "o-", color=colour, label=how)
    ax.axhline(recomputed(lines)[key], color="grey", linestyle="--", label=RECOMPUTED)
    if free := free_gib(lines):
        ax.axvline(free, color="grey", linestyle=":", label="copies take as long as the forward pass")
    ax.set_ylim(0, 1.1 * max(line[key] for line in lines))
    ax.set_ylabel(label)


if __name__ == "__main__":
    options = parse()
    if options.plot:
        result, picture = json.loads(Path(options.plot).read_text()), Path(options.plot)
    else:
        bench.prepare(options.attention)
        result, picture = bench.main("sweep", options, groups, lambda *_: {}, shape=shape_of(options)), options.out
    print(plot(result, picture.with_suffix(".png")))
