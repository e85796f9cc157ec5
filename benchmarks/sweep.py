"""How much can move: step time and device memory as more of each layer's residuals go to the host, and of more layers.

    python -m benchmarks.sweep [--out benchmarks/results/sweep.json] [--layers 16 --batch 2 --seqs 2048 8192]
    python -m benchmarks.sweep --plot benchmarks/results/sweep.json    # the picture, beside it

The residuals of `benchmarks.dense`'s layer are moved one after another, those first that take longest to compute again
per byte; what does not move is computed again. Then three of them are moved in a share of the layers, and saved in the
others. Offload is free until the copies of a layer take as long as its forward pass; the bandwidth for that is measured
in the same run, in a trace.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import dense, peers, streams
from benchmarks.cases import OVERLAP, PIPELINED, Variant
from benchmarks.steps import compile_step, initial

ORDER = (
    "layer_input",
    "attn/context",
    "mlp/fc1.gate",
    "attn/q",
    "attn/k",
    "attn/v",
    "mlp_input",
    "mlp/fc1.up",
    "mlp/act",
)
HOW = {"jaxoffload": ("ours", OVERLAP), "JAX": ("loop", PIPELINED)}  # who, XLA's options
RECOMPUTED, SHARE = "everything recomputed", "jaxoffload, in a share of the layers"
SMALL = {"fontsize": 7, "va": "top", "ha": "left", "rotation_mode": "anchor"}
COLOURS = {"JAX": "tab:red", "jaxoffload": "tab:blue", SHARE: "tab:green"}


def main() -> None:
    options = parse()
    if options.plot:
        print(plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png")))
        return
    lines = []
    for seq in options.seqs:
        lines += measure(argparse.Namespace(**{**vars(options), "seq": seq}))
    provenance = peers.provenance("sweep", options.commit, options.fsdp * options.expert)
    result = {**provenance, "shape": dense.CASE.shape(options) | {"seq": options.seqs}, "lines": lines}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(plot(result, options.out.with_suffix(".png")))


def parse() -> argparse.Namespace:
    parser = peers.arguments(__doc__)
    parser.set_defaults(out=Path("benchmarks/results/sweep.json"))
    parser.add_argument("--seqs", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--hows", nargs="+", choices=[*HOW, SHARE], default=[*HOW, SHARE], help="who moves them")
    parser.add_argument("--plot", type=Path, help="a file of results, only to be plotted")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line a set and a way to move it; one a share of the layers; one for full recomputation."""
    import jax

    state = initial(dense.CASE, options)

    def line(how: str, variant: Variant) -> dict[str, Any]:
        step, host, _ = compile_step(dense.CASE, options, variant)

        def run() -> None:
            nonlocal state
            state = jax.block_until_ready(step(*state))

        run()
        spent = []
        for _ in range(options.steps):
            begin = time.perf_counter()
            run()
            spent.append(1e3 * (time.perf_counter() - begin))
        found = {
            "seq": options.seq,
            "how": how,
            "moved": [name for name, decision in variant.residuals.items() if decision == "offload"],
            "host_gib": round(host / options.fsdp / options.expert / 2**30, 4),  # of a device
            "step_ms": round(statistics.median(spent), 2),
            "temp_gib": round(step.memory_analysis().temp_size_in_bytes / 2**30, 4),
        }
        if variant.who == "ours":
            for events in streams.traced(run).values():
                profile = streams.summary(events)
                found |= {key: profile[key] for key in ("d2h_ms", "h2d_ms", "exposed_ms")}
        return found

    lines = [line(RECOMPUTED, Variant("loop", {}, {}))]
    for number in range(len(ORDER)):
        moved = dict.fromkeys(ORDER[: number + 1], "offload")
        lines += [line(how, Variant(who, moved, xla)) for how, (who, xla) in HOW.items() if how in options.hows]
    three = dict.fromkeys(ORDER[:3], "offload")
    for share in (0.25, 0.5, 0.75) if SHARE in options.hows else ():
        lines.append(line(SHARE, Variant("ours", three, OVERLAP, (("offload_layers", share),))))
    return lines


def free_gib(lines: list[dict[str, Any]]) -> float | None:
    """GiB whose copies take as long as the forward pass, a quarter of the step that recomputes all."""
    (recomputed,) = (line for line in lines if line["how"] == RECOMPUTED)
    rates = [line["host_gib"] / line["d2h_ms"] for line in lines if line.get("d2h_ms")]
    return recomputed["step_ms"] / 4 * statistics.median(rates) if rates else None


def plot(result: dict[str, Any], path: Path) -> str:
    """Time above, memory below, one column for each length of the sequences; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = result["shape"]
    seqs = sorted({line["seq"] for line in result["lines"]})
    figure, axes = plt.subplots(2, len(seqs), figsize=(2.4 + 4.8 * len(seqs), 7.2), sharex="col", squeeze=False)
    for column, seq in enumerate(seqs):
        lines = [line for line in result["lines"] if line["seq"] == seq]
        (recomputed,) = (line for line in lines if line["how"] == RECOMPUTED)
        for row, (key, label) in enumerate((("step_ms", "step, ms"), ("temp_gib", "device memory of the step, GiB"))):
            ax = axes[row][column]
            for how, colour in COLOURS.items():
                if not (mine := [line for line in lines if line["how"] == how]):
                    continue
                ax.plot([m["host_gib"] for m in mine], [m[key] for m in mine], "o-", color=colour, label=how)
            ax.axhline(recomputed[key], color="grey", linestyle="--", label=RECOMPUTED)
            if free := free_gib(lines):
                ax.axvline(free, color="grey", linestyle=":", label="copies take as long as the forward pass")
            ax.set_ylim(0, 1.1 * max(line[key] for line in lines))
            ax.set_ylabel(label)
        for line in (line for line in lines if line["how"] == "jaxoffload"):
            at = line["host_gib"], line["step_ms"]
            axes[0][column].annotate(line["moved"][-1], at, (0, -8), textcoords="offset points", rotation=-60, **SMALL)
        axes[0][column].set_title(f"{shape['batch']} x {seq} tokens")
        axes[1][column].set_xlabel("on the host, GiB")
    axes[1][0].legend(fontsize="small", loc="lower right")
    shape_of = f"{shape['layers']} layers of Llama 3's shape, width {shape['d_model']}, on {result['device']}"
    figure.suptitle(f"One residual after another goes to the host\n{shape_of}", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return str(path)


if __name__ == "__main__":
    main()
