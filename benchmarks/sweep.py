"""How much can move: step time and device memory as more of each layer's residuals go to the host.

    python -m benchmarks.sweep [--out benchmarks/results/sweep.json] [--layers 16 --batch 2 --seqs 2048 8192]
    python -m benchmarks.sweep --plot benchmarks/results/sweep.json    # the picture, beside it

The residuals of `benchmarks.dense`'s layer are moved one after another, those first whose matrix products take longest
per byte; what does not move is computed again. Offload is free until the copies of a layer take as long as its forward
pass; the bandwidth for that is measured in the same run, in a trace.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import dense, streams

ORDER = ("layer_input", "mlp/fc1.gate", "attn/q", "attn/k", "attn/v", "mlp_input", "mlp/fc1.up", "mlp/act")
SETS = {name: ORDER[: number + 1] for number, name in enumerate(ORDER)}
HOW = {  # who, XLA's options
    "jaxoffload": ("ours", dense.OVERLAP),
    "JAX": ("loop", dense.PIPELINED),
}


def main() -> None:
    options = parse()
    if options.plot:
        print(plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png")))
        return
    lines = []
    for seq in options.seqs:
        lines += measure(argparse.Namespace(**{**vars(options), "seq": seq}))
    provenance = dense.provenance("sweep", options.commit, options.fsdp)
    result = {**provenance, "shape": dense.shape_of(options) | {"seq": options.seqs}, "lines": lines}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(plot(result, options.out.with_suffix(".png")))


def parse() -> argparse.Namespace:
    parser = dense.arguments(__doc__)
    parser.set_defaults(out=Path("benchmarks/results/sweep.json"))
    parser.add_argument("--seqs", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--plot", type=Path, help="a file of results, only to be plotted")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One line a set and a way to move it; one for full recomputation."""
    import jax

    state = dense.initial(options)

    def line(how: str, moved: str, variant: dense.Variant) -> dict[str, Any]:
        nonlocal state
        step, host = dense.compile_step(options, variant)
        state = jax.block_until_ready(step(*state))
        spent = []
        for _ in range(options.steps):
            begin = time.perf_counter()
            state = jax.block_until_ready(step(*state))
            spent.append(1e3 * (time.perf_counter() - begin))
        found = {
            "seq": options.seq,
            "how": how,
            "last moved": moved,
            "gib_a_layer": round(host / options.fsdp / options.layers / 2**30, 4),  # of a device
            "step_ms": round(statistics.median(spent), 2),
            "temp_gib": round(step.memory_analysis().temp_size_in_bytes / 2**30, 4),
        }
        if how == "jaxoffload":
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    state = jax.block_until_ready(step(*state))
                gpus = streams.read(Path(folder))
            for events in gpus.values():
                profile = streams.summary(events)
                found |= {key: profile[key] for key in ("d2h_ms", "h2d_ms", "exposed_ms")}
        return found

    lines = [line("recomputed", "", dense.Variant("loop", {}, {}))]
    for moved, names in SETS.items():
        for how, (who, xla) in HOW.items():
            lines.append(line(how, moved, dense.Variant(who, dict.fromkeys(names, "offload"), xla)))
    return lines


def free_gib(lines: list[dict[str, Any]], layers: int) -> float | None:
    """GiB a layer whose copies take as long as the layer's forward pass, a quarter of the step that recomputes all."""
    (recomputed,) = (line for line in lines if line["how"] == "recomputed")
    rates = [layers * line["gib_a_layer"] / line["d2h_ms"] for line in lines if line.get("d2h_ms")]
    return recomputed["step_ms"] / 4 / layers * statistics.median(rates) if rates else None


def plot(result: dict[str, Any], path: Path) -> str:
    """Time above, memory below, one column for each length of the sequences; written to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers, batch = result["shape"]["layers"], result["shape"]["batch"]
    seqs = sorted({line["seq"] for line in result["lines"]})
    figure, axes = plt.subplots(2, len(seqs), figsize=(4.8 * len(seqs), 6.4), sharex="col", squeeze=False)
    for column, seq in enumerate(seqs):
        lines = [line for line in result["lines"] if line["seq"] == seq]
        for row, (key, label) in enumerate((("step_ms", "step, ms"), ("temp_gib", "device memory of the step, GiB"))):
            ax = axes[row][column]
            for how, colour in (("JAX", "tab:red"), ("jaxoffload", "tab:blue")):
                mine = [line for line in lines if line["how"] == how]
                ax.plot([m["gib_a_layer"] for m in mine], [m[key] for m in mine], "o-", color=colour, label=how)
            (recomputed,) = (line for line in lines if line["how"] == "recomputed")
            ax.axhline(recomputed[key], color="grey", linestyle="--", label="everything recomputed")
            if free := free_gib(lines, layers):
                ax.axvline(free, color="grey", linestyle=":", label="copies as long as a layer's forward pass")
            ax.set_ylim(0, 1.1 * max(line[key] for line in lines))
            ax.set_ylabel(label)
        axes[0][column].set_title(f"{batch} x {seq} tokens")
        axes[1][column].set_xlabel("offloaded, GiB a layer")
    axes[0][0].legend(fontsize="small", loc="lower left")
    figure.suptitle(f"{layers} layers of Llama 3's shape, width {result['shape']['d_model']}, on {result['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    return str(path)


if __name__ == "__main__":
    main()
