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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks import dense, peers, streams
from benchmarks.cases import OVERLAP, PIPELINED, Options, Peer, Variant
from benchmarks.steps import NO_PLAN, compile_step, initial, planned_gib

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
HOW: dict[str, tuple[Peer, Options]] = {"jaxoffload": ("ours", OVERLAP), "JAX": ("jax in scan", PIPELINED)}
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
    parser.add_argument(
        "--hows", nargs="+", choices=[*HOW, SHARE], default=[*HOW, SHARE], help="which series to measure"
    )
    parser.add_argument("--plot", type=Path, help="plot this result file, and measure nothing")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a line per variant."""
    state, lines = initial(dense.CASE, options), []
    for how, variant in variants(options.hows):
        line, state = measure_one(options, how, variant, state)
        lines += [line] if line else []
    return lines


def variants(hows: list[str]) -> Iterator[tuple[str, Variant]]:
    """Yield full recomputation, each set of residuals with each series, and each share of the layers."""
    yield RECOMPUTED, Variant("jax in scan", {}, {})
    for number in range(len(ORDER)):
        residuals = dict.fromkeys(ORDER[: number + 1], "offload")
        yield from ((how, Variant(peer, residuals, xla)) for how, (peer, xla) in HOW.items() if how in hows)
    if SHARE in hows:
        for share in (0.25, 0.5, 0.75):
            residuals = dict.fromkeys(ORDER[:3], "offload")
            yield SHARE, Variant("ours", residuals, OVERLAP, (("offload_layers", share),))


def measure_one(
    options: argparse.Namespace, how: str, variant: Variant, state: Any
) -> tuple[dict[str, Any] | None, Any]:
    """Return a variant's times and memory, None where XLA does not say what that is, and the state after its steps,
    which update it in place."""
    step, host_bytes, _ = compile_step(dense.CASE, options, variant)
    if (planned := planned_gib(step)) is None:
        peers.say(f"{how}, {', '.join(variant.residuals)}: left out; {NO_PLAN}")
        return None, state

    def run() -> float:
        nonlocal state
        begin = time.perf_counter()
        state = jax.block_until_ready(step(*state))
        return 1e3 * (time.perf_counter() - begin)

    run()
    line = {
        "seq": options.seq,
        "how": how,
        "moved": [name for name, decision in variant.residuals.items() if decision == "offload"],
        "host_gib": round(host_bytes / options.fsdp / options.expert / 2**30, 4),  # per device
        "step_ms": round(statistics.median(run() for _ in range(options.steps)), 2),
        "temp_gib": planned["temp_gib"],
    }
    if variant.peer == "ours":
        for events in streams.traced(run).values():
            profile = streams.summary(events)
            line |= {key: profile[key] for key in ("d2h_ms", "h2d_ms", "exposed_ms")}
    return line, state


def recomputed(lines: list[dict[str, Any]]) -> dict[str, Any]:
    (line,) = (line for line in lines if line["how"] == RECOMPUTED)
    return line


def free_gib(lines: list[dict[str, Any]]) -> float | None:
    """Return the GiB whose copies take as long as the forward pass, a quarter of the step that recomputes everything;
    None if no line has the time of copies."""
    rates = [line["host_gib"] / line["d2h_ms"] for line in lines if line.get("d2h_ms")]
    return recomputed(lines)["step_ms"] / 4 * statistics.median(rates) if rates else None


def plot(result: dict[str, Any], path: Path) -> str:
    """Draw step times above and memory below, with a column per sequence length; return the path written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = result["shape"]
    seqs = sorted({line["seq"] for line in result["lines"]})
    figure, axes = plt.subplots(2, len(seqs), figsize=(2.4 + 4.8 * len(seqs), 7.2), sharex="col", squeeze=False)
    for column, seq in enumerate(seqs):
        lines = [line for line in result["lines"] if line["seq"] == seq]
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
    main()
