"""Layers trained by ours and by PyTorch, on one card: step time, device memory, and where the GPU's time goes.

    python -m benchmarks.pytorch [--param_dtype bfloat16] [--out FILE]
    python -m benchmarks.pytorch --case moe --out benchmarks/results/pytorch-moe.json  # Mixtral's layers, grouped GEMMs

A step sums the gradients of the microbatches in the dtype of the weights, and descends along them. In each of the
rounds a process of each peer runs all of its modes. `beyond_gib`: the device's memory without weights and gradients,
of ours as XLA plans it, of PyTorch as its allocator counts it. `kernels_ms`: of a traced step, by what they compute;
of a fusion that does several things, the first of `KINDS`.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import bench
from benchmarks.bench import GIB, Group, Variant, markdown
from benchmarks.cases import SIZES, Case, group_of, model_flops, ours, shape_of
from benchmarks.moe import CASES
from jaxoffload.proof._program import hlo
from jaxoffload.proof._program.kernels import ATTENTION_KERNELS, kind_of_kernel
from jaxoffload.proof._program.trace import Event, length, merged, traced
from models import metrics


def ours_of(case: Case) -> dict[str, Variant]:
    moved, saved = (dict.fromkeys(case.moved, decision) for decision in ("offload", "save"))
    return {
        "interleaved, all moved": ours(moved),
        "interleaved, gate and keys moved": ours(saved | dict.fromkeys((case.fc1[0], "attn/k"), "offload")),
        "everything saved": ours(saved),
        "everything recomputed": ours({}),
    }


OURS = tuple(ours_of(CASES["dense"]))
TORCH = ("no checkpoint", "selective checkpointing", "everything recomputed", "moved by hooks")
RATIOS = (
    ("interleaved, all moved", "no checkpoint", "ms"),
    ("everything saved", "no checkpoint", "ms"),
    ("interleaved, all moved", "selective checkpointing", "ms"),
    ("interleaved, all moved", "everything recomputed", "beyond_gib"),
)

# Kind -> the operations of a fusion, any of which decides; otherwise it is "other".
KINDS = {
    "activation": {"logistic", "exponential", "tanh"},
    "routing": {"sort", "gather", "scatter"},
    "RoPE": {"concatenate"},
    "norms": {"rsqrt", "reduce"},
    "sums of gradients": {"sum"},  # a row is read, added to and written
    "copies into stacks": {"dynamic-update-slice"},
    "other": {"add", "multiply", "subtract"},
    "casts": {"convert"},
    "copies": {"copy", "transpose"},
    "zeros": {"broadcast"},
}
# Kind -> the names of kernels that XLA did not compile.
LIBRARIES = {
    "attention": r"cudnn|fmha|sdpa",
    "matmuls": r"nvjet|gemm|cutlass|xmma|splitK",
    "grouped GEMMs": r"mosaic_gpu",
}


def kind_of(line: hlo.Instruction, module: hlo.Module) -> str:
    """Return what an instruction computes."""
    every = [line, *module.called(line)]
    if known := next(filter(None, map(kind_of_kernel, every)), None):
        return {ATTENTION_KERNELS: "attention", "Mosaic kernels": "grouped GEMMs"}.get(known, known)
    inside = {each.opcode for each in every}
    inside |= {"sum"} if {"dynamic-slice", "add", "dynamic-update-slice"} <= inside else set()
    return next((kind for kind, opcodes in KINDS.items() if opcodes & inside), "other")


def kinds_of(events: Sequence[Event], module: hlo.Module) -> list[str]:
    """Return what kernels compute. Of one in a command buffer a trace does not say which instruction it is of, but XLA
    names the kernel of an instruction after it."""
    lines = {name: line for line in module for name in (line.name.replace(".", "_"), line.name)}
    named = lambda name: next((kind for kind, names in LIBRARIES.items() if re.search(names, name)), "other")

    def kind(e: Event) -> str:
        if e.name.startswith("Memset"):
            return "zeros"
        line = lines.get(e.op) or lines.get(e.name)
        return kind_of(line, module) if line else named(e.name)

    return list(map(kind, events))


def kernels(step: Callable[..., Any], group: Group) -> dict[str, float]:
    """Return the milliseconds of a step's kernels by kind, and those in which none ran."""
    state = step(*group.initial())
    module = hlo.parse(step.as_text())
    events = [e for e in traced(lambda: jax.block_until_ready(step(*state))) if e.module == module.name]
    on_device = [e for e in events if not e.direction]
    spans = merged((e.start, e.end) for e in on_device)
    found = Counter[str]()
    for e, kind in zip(on_device, kinds_of(on_device, module), strict=True):
        found[kind] += (e.end - e.start) / 1e6
    return {**found, "idle": (spans[-1][1] - spans[0][0] - length(spans)) / 1e6}


def run_ours(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts of each mode, as PyTorch's process prints its own."""
    bench.prepare(options.attention, options.grouped)
    case = CASES[options.case]
    variants = {(mode, ""): variant for mode, variant in ours_of(case).items() if mode in options.modes}
    group = group_of(case, options, variants, microbatches=options.microbatches)
    made = jax.eval_shape(group.initial)
    weights, state = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(of)) for of in (made[0], made))
    once = argparse.Namespace(steps=options.steps, rounds=0, profile=[])
    bench.measure(group, once)
    modes = {}
    for (mode, _), step in group.steps.items():
        facts = modes[mode] = step.facts
        if "step_ms" in facts:
            # Without the batch that a step returns for the next one.
            facts |= {"weight_bytes": weights, "peak_bytes": state + facts["temp_gib"] * GIB}
            if mode in options.profile and jax.default_backend() == "gpu":
                facts["kernels_ms"] = kernels(step.run, group)
    return {"device": jax.devices()[0].device_kind, "versions": bench.versions(), "modes": modes}


def run_child(peer: str, options: argparse.Namespace, is_last: bool) -> dict[str, Any]:
    """Run a peer in a process of its own, and return what it found. Ours traces kernels in the last round alone."""
    if peer == "ours":
        with tempfile.NamedTemporaryFile() as file:
            command = ["benchmarks.pytorch", *sys.argv[1:], "--child", "--out", file.name]
            command += [] if is_last else ["--no-profile"]
            subprocess.run([sys.executable, "-m", *command], check=True)
            return json.loads(Path(file.name).read_text())
    sizes = {name: getattr(options, name) for name in (*SIZES, "microbatches")} | CASES[options.case].fields
    modes = [mode for mode in TORCH if mode in options.modes]
    given = json.dumps({"modes": modes, "steps": options.steps, "sizes": sizes})
    command = ["benchmarks.torch_layers", given]
    done = subprocess.run([sys.executable, "-m", *command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def together(rounds: list[dict[str, Any]], options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the facts of a peer's modes, of all rounds."""
    found = {}
    for mode in rounds[0]["modes"]:
        every = [of["modes"][mode] for of in rounds]
        each = [of for of in every if "step_ms" in of]
        if not each:
            found[mode] = every[0]
            continue
        step_ms = statistics.median(of["step_ms"] for of in each)
        spread = [ms for of in each for ms in of["spread_ms"]]
        flops = options.microbatches * model_flops(CASES[options.case], options)
        facts = {"ms": step_ms / options.microbatches, "step_ms": step_ms, "spread_ms": [min(spread), max(spread)]}
        facts["mfu"] = metrics.mfu(1e3 * flops / step_ms, device)
        if "peak_bytes" in each[0]:
            peak, weights = (max(of[name] for of in each) / GIB for name in ("peak_bytes", "weight_bytes"))
            facts |= {"all_gib": peak, "beyond_gib": peak - 2 * weights}
        facts["kernels_ms"] = each[-1].get("kernels_ms", {})
        found[mode] = facts
    return json.loads(json.dumps(found), parse_float=lambda x: round(float(x), 4))


def ratios(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return `RATIOS` of what ran: ours / PyTorch's."""
    of = lambda peer, mode, what: found.get(peer, {}).get(mode, {}).get(what)
    both = {f"{a} / {b} by {what}": (of("ours", a, what), of("torch", b, what)) for a, b, what in RATIOS}
    return {name: round(a / b, 4) for name, (a, b) in both.items() if a and b}


def tables(result: dict[str, Any]) -> str:
    """Return time and memory, and milliseconds of a microbatch by kind, as Markdown tables."""
    ran = [
        (f"{who}, {mode}", of)
        for peer, who in (("torch", "PyTorch"), ("ours", "**jaxoffload**"))
        for mode, of in result["peers"].get(peer, {}).items()
        if "ms" in of
    ]
    memory = lambda of: [f"{of[name]:.1f} GiB" if name in of else "" for name in ("all_gib", "beyond_gib")]
    share = lambda of: f"{100 * of['mfu']:.1f} %" if of["mfu"] else "not known"
    rows = [[who, f"{of['ms']:.0f} ms", *memory(of), share(of)] for who, of in ran]
    head = ["", "step per microbatch", "device memory", "beyond weights and gradients", "model FLOP utilisation"]
    kinds = list(dict.fromkeys(kind for _, of in ran for kind in of["kernels_ms"]))
    count = result["microbatches"]
    milliseconds = lambda of: [f"{of['kernels_ms'].get(kind, 0) / count:.1f}" for kind in kinds]
    of_kinds = [[who, *milliseconds(of)] for who, of in ran if of["kernels_ms"]]
    return "\n\n".join([markdown(head, *rows), markdown(["ms", *kinds], *of_kinds)])


def main(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {}
    rounds: dict[str, list[dict[str, Any]]] = {"torch": [], "ours": []}
    for number in range(options.rounds):
        for peer, of in rounds.items():
            of.append(run_child(peer, options, number == options.rounds - 1))
            found = {peer: together(of, options, of[0]["device"]) for peer, of in rounds.items() if of}
            devices = {of[0]["device"] for of in rounds.values() if of}
            versions = {name: text for of in rounds.values() if of for name, text in of[0]["versions"].items()}
            result = {"device": f"1 {' and '.join(sorted(devices))}", "versions": versions}
            result |= {"command": bench.command_of("pytorch"), "commit": options.commit, "shape": shape_of(options)}
            result |= {"microbatches": options.microbatches, "peers": found, "ratios": ratios(found)}
            bench.write(options, result)
    print(tables(result), json.dumps(result["ratios"], indent=1), sep="\n\n")


def parse() -> argparse.Namespace:
    more = {"case": "dense", "layers": 8, "param_dtype": "bfloat16", "microbatches": 8, "rounds": 2, "child": False}
    more["profile"] = ["interleaved, all moved", "everything saved"]
    made = bench.parser(__doc__, "pytorch", **SIZES | more, modes=[*dict.fromkeys((*OURS, *TORCH))])
    options = made.parse_args()
    if wrong := [name for name in ("qk_norm", "fsdp", "expert") if getattr(options, name) != SIZES[name]]:
        made.error(f"--{wrong[0]}: PyTorch's layers have no other than {SIZES[wrong[0]]}")
    return options


if __name__ == "__main__":
    options = parse()
    if options.child:
        bench.write(options, run_ours(options))
    else:
        main(options)
