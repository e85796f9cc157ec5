"""Gradients over microbatches: interleaved, and one after another by plain JAX and by ours.

    python -m benchmarks.accumulate [--microbatches 2 4 8] [--out benchmarks/results/accumulate.json]
    python -m benchmarks.accumulate --layers 48 --microbatches 8 --modes remat interleaved \\
        --out benchmarks/results/accumulate-48.json
    python -m benchmarks.accumulate --case moe --layers 4 --microbatches 4 8 \\
        --out benchmarks/results/accumulate-moe.json
    python -m benchmarks.accumulate --fsdp 2 --out benchmarks/results/accumulate-fsdp.json
    python -m benchmarks.accumulate --case moe --expert 2 --batch 4 --layers 4 --capacity 1.25 --times \\
        --modes one_by_one interleaved --out benchmarks/results/accumulate-experts.json

A step is the gradient of a stack of the example model's layers, summed over microbatches of `--batch` sequences each,
and an SGD update in place. One process times all modes alternately. A mode with several variants is timed with each
that fits on the device, and the fastest counts. Times are per microbatch.
"""

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxoffload
from benchmarks import dense, moe, streams
from benchmarks.cases import OVERLAP, Case, Variant, modes_of
from benchmarks.peers import arguments, markdown, percent, provenance, say
from benchmarks.steps import NO_PLAN, import_te, initial, loss_of, mfu, model_flops, planned_gib, shardings, start
from jaxoffload.proof import scheduling_options

CASES = {"dense": dense.CASE, "moe": moe.CASE}
# What autodiff wants of a layer, except what an elementwise function of it gives again.
MOVED = ("layer_input", "attn/q", "attn/k", "attn/v", "attn/context", "mlp_input")
MLP = {"dense": ("mlp/fc1.gate", "mlp/fc1.up"), "moe": ("moe/fc1.gate", "moe/fc1.up")}
BY_ACCUMULATE = ("in_turn_recomputed", "in_turn_saved", "interleaved")  # the others are loops over gradients
MODES = ("remat", "saved_all", "ours_saved_all", "one_by_one", *BY_ACCUMULATE)


def main() -> None:
    # The weights and gradients of many layers need more than the 75 % of the device that JAX takes by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    options = parse()
    import_te(options)
    case = CASES[options.case]
    result = provenance("accumulate", options.commit, options.fsdp * options.expert)
    result |= {"shape": {"case": options.case, **case.shape(options)}, "microbatches": {}}
    for count in options.microbatches:
        for modes in measured(case, options, count):
            result["microbatches"][str(count)] = {"modes": modes, "ratios": ratios(modes)}
            result["compile_s, most / least microbatches"] = compile_ratio(result["microbatches"])
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    for count, found in result["microbatches"].items():
        print(count, "microbatches:", json.dumps(found["ratios"]))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.set_defaults(out=Path("benchmarks/results/accumulate.json"))
    moe.arguments(parser)
    parser.set_defaults(layers=16)
    parser.add_argument("--case", choices=CASES, default="dense")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--times", action="store_true", help="compile twice: XLA then knows how long kernels take")
    parser.add_argument("--variants", nargs="+", help="those of each mode that are timed; all by default")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in which every mode is timed")
    options = parser.parse_args()
    names = {name for of in variants_of(CASES[options.case], options.case).values() for name in of}
    if options.variants and (unknown := set(options.variants) - names):
        parser.error(f"--variants: {', '.join(sorted(unknown))}: not among {', '.join(sorted(names))}")
    return options


def variants_of(case: Case, name: str) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant; `one_by_one` has the candidates for `ours_best`."""
    modes = modes_of(case)
    moved = dict.fromkeys((*MOVED, *MLP[name]), "offload")
    kept = moved | dict.fromkeys(("attn/k", "attn/v"), "save")
    less = kept | dict.fromkeys(("attn/q", "mlp_input"), "recompute")
    gate = dict.fromkeys(moved, "save") | {MLP[name][0]: "offload"}
    return {
        **{mode: modes[mode] for mode in ("remat", "saved_all", "ours_saved_all")},
        "one_by_one": modes["ours_best"],
        "in_turn_recomputed": {"everything": Variant("ours", {}, OVERLAP)},
        "in_turn_saved": {"all names": Variant("ours", dict.fromkeys(case.all_names, "save"), OVERLAP)},
        "interleaved": {
            "all moved": Variant("ours", moved, OVERLAP),
            "k and v kept, the rest moved": Variant("ours", kept, OVERLAP),
            # Where several GPUs copy both ways at once, the bus has room for fewer; behind four, for the gate.
            "k and v kept, q and mlp_input recomputed, the rest moved": Variant("ours", less, OVERLAP),
            "gate moved, the rest saved": Variant("ours", gate, OVERLAP),
            # The keys are small; of gates alone jaxlib 0.11.2 tells no memory (docs/upstream.md#memory-analysis).
            "gate and keys moved, the rest saved": Variant("ours", gate | {"attn/k": "offload"}, OVERLAP),
        },
    }


# ------------------------------------------------------------------------------------------------------------ measure


Key = tuple[str, str]  # a mode, and the name of one of its variants


class Step(NamedTuple):
    """A compiled step, (weights, batch) -> (weights, batch), and what is known of it before it runs."""

    run: Callable[..., Any]
    facts: dict[str, Any]


def compiled(case: Case, options: argparse.Namespace, variant: Variant, count: int, by_accumulate: bool) -> Step | None:
    """Compile a step over so many microbatches. None if XLA does not say what memory it planned."""
    loss = loss_of(case, options, variant)

    def one_by_one(weights: Any, batch: Any) -> Any:
        add = lambda sums, x: (jax.tree.map(jnp.add, sums, jax.grad(loss)(weights, x)), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batch)[0]

    accumulated = lambda *args: jaxoffload.accumulate(loss, reduction="sum")(*args)[1]
    gradients = accumulated if by_accumulate else one_by_one

    def step(weights: Any, batch: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda w, g: w - 1e-4 / count * g, weights, gradients(weights, batch)), batch

    weights, x = jax.eval_shape(start(case, options))
    batch = jax.ShapeDtypeStruct((count, *x.shape), x.dtype)
    where = placed(case, options)
    begin = time.perf_counter()

    def program_of(xla: Any) -> Any:
        jitted = jax.jit(step, in_shardings=where, out_shardings=where, donate_argnums=0, compiler_options=xla)
        return jitted.lower(weights, batch).compile()

    program = program_of(variant.options)
    if options.times and variant.options == OVERLAP:
        program = program_of(scheduling_options(program))
    seconds = round(time.perf_counter() - begin, 2)
    facts = planned_gib(program)
    return None if facts is None else Step(program, {"compile_s": seconds, **facts})


def placed(case: Case, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the shardings of the weights and of the microbatches."""
    weights, x = shardings(case, options)
    return weights, NamedSharding(x.mesh, PartitionSpec(None, *x.spec)) if isinstance(x, NamedSharding) else x


def measured(case: Case, options: argparse.Namespace, count: int) -> Iterator[dict[str, Any]]:
    """Yield what is known so far, so that a later failure loses nothing: mode -> the results of its fastest variant,
    with those of the others. The first run of a mode fills the pinned pool, a second for each GiB."""
    chosen = {mode: of for mode, of in variants_of(case, options.case).items() if mode in options.modes}
    steps: dict[Key, Step] = {}
    too_large: dict[Key, Step] = {}
    for mode, variants in chosen.items():
        wanted = [name for name in variants if name in (options.variants or variants)]
        for name in wanted:
            step = compiled(case, options, variants[name], count, by_accumulate=mode in BY_ACCUMULATE)
            if step is None:
                say(f"{count} microbatches, {mode}, {name}: left out; {NO_PLAN}")
                continue
            (steps if step.facts["all_gib"] <= device_gib() else too_large)[mode, name] = step
            say(f"{count} microbatches, {mode}, {name}: compiled, {step.facts}")
    weights, x = initial(case, options)
    batch = jax.jit(lambda x: jnp.stack([jnp.roll(x, n) for n in range(count)]), out_shardings=placed(case, options)[1])
    state = weights, batch(x)
    spent: dict[Key, list[float]] = {}

    def run(key: Key) -> None:
        nonlocal state
        state = jax.block_until_ready(steps[key].run(*state))

    def timed(key: Key) -> float:
        begin = time.perf_counter()
        run(key)
        return 1e3 * (time.perf_counter() - begin) / count

    flops = model_flops(case, options) / options.fsdp / options.expert

    def found() -> dict[str, Any]:
        modes = {mode: result_of((mode, name), spent, steps, flops) for mode, name in contenders(spent, steps)}
        for (mode, name), step in too_large.items():
            modes.setdefault(mode, {}).setdefault("do_not_fit", {})[name] = step.facts
        return modes

    yield found()
    for key in steps:
        timed(key)
        spent[key] = [timed(key)]
        say(f"{count} microbatches, {', '.join(key)}: {spent[key][0]:.1f} ms")
        yield found()
    near = contenders(spent, steps)
    for _ in range(options.rounds):
        for key in near:
            spent[key] += [timed(key) for _ in range(options.steps)]
    yield (modes := found())
    for mode in ("interleaved", "one_by_one"):
        if "options" in modes.get(mode, {}):
            gpus = streams.traced(functools.partial(run, (mode, modes[mode]["options"])))
            for events in [*gpus.values()][:1]:  # all GPUs do the same; there is none on a CPU
                modes[mode]["profile"] = streams.summary(events)
    yield modes


def device_gib() -> float:
    """Return the memory of a device that JAX may use."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", math.inf) / 2**30


def result_of(key: Key, spent: dict[Key, list[float]], steps: dict[Key, Step], flops: float) -> dict[str, Any]:
    """Return the results of a mode whose fastest variant this is. `flops`: per device and microbatch."""
    ms = {key: round(statistics.median(times), 2) for key, times in spent.items()}
    others = [other for other in spent if other[0] == key[0] and other != key]
    return {
        "options": key[1],
        "ms": ms[key],
        "spread_ms": [round(min(spent[key]), 2), round(max(spent[key]), 2)],
        "mfu": mfu(flops, ms[key]),
        **steps[key].facts,
        "other_options": {other[1]: {"ms": ms[other], **steps[other].facts} for other in others},
    }


def contenders(spent: dict[Key, list[float]], steps: dict[Key, Step]) -> list[Key]:
    """Return each mode's fastest variant; `one_by_one` may take no more memory than the least that `remat` needs."""
    gib = {key: step.facts["temp_gib"] for key, step in steps.items()}
    limit = min((gib[key] for key in gib if key[0] == "remat"), default=float("inf"))
    fits = [key for key in spent if key[0] != "one_by_one" or gib[key] <= limit]
    modes = dict.fromkeys(mode for mode, _ in fits)
    return [min((key for key in fits if key[0] == mode), key=lambda key: spent[key][-1]) for mode in modes]


# ------------------------------------------------------------------------------------------------------------- report


def ratios(modes: dict[str, Any]) -> dict[str, float]:
    """Return every ratio for which the modes were measured.

    won_back: the share of recomputation's time that interleaving wins back.
    """
    ms = {mode: found["ms"] for mode, found in modes.items() if "ms" in found}
    pairs = [("interleaved", "saved_all"), ("interleaved", "remat"), ("interleaved", "one_by_one")]
    pairs += [("in_turn_recomputed", "remat"), ("in_turn_saved", "ours_saved_all")]
    pairs = [(a, b) for a, b in pairs if {a, b} <= ms.keys()]
    found = {f"{a}/{b}": ms[a] / ms[b] for a, b in pairs}
    found |= {f"{a}/{b} by temp_gib": modes[a]["temp_gib"] / modes[b]["temp_gib"] for a, b in pairs}
    if ms.keys() >= {"interleaved", "remat"} and (saved := [ms[m] for m in ("saved_all", "ours_saved_all") if m in ms]):
        found["won_back"] = (ms["remat"] - ms["interleaved"]) / (ms["remat"] - min(saved))
    profiles = {mode: of["profile"] for mode, of in modes.items() if "profile" in of}
    if profile := profiles.get("interleaved"):
        found["exposed/step"] = profile["exposed_ms"] / profile["step_ms"]
    exposed = {mode: profile.get("collectives_exposed_ms") for mode, profile in profiles.items()}
    if exposed.get("interleaved") is not None and exposed.get("one_by_one"):
        found["interleaved/one_by_one by collectives_exposed_ms"] = exposed["interleaved"] / exposed["one_by_one"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def compile_ratio(microbatches: dict[str, Any]) -> float | None:
    modes = [found["modes"] for _, found in sorted(microbatches.items(), key=lambda item: int(item[0]))]
    seconds = [found["interleaved"]["compile_s"] for found in modes if "compile_s" in found.get("interleaved", {})]
    return round(seconds[-1] / seconds[0], 3) if len(seconds) > 1 else None


WHAT = {
    "remat": "JAX, everything recomputed",
    "saved_all": "JAX, all names saved; attention runs again",
    "ours_saved_all": "**jaxoffload**, one after another, all saved",
    "one_by_one": "**jaxoffload**, one after another, what fits in the memory of full recomputation",
    "in_turn_recomputed": "**jaxoffload**, `accumulate`, everything recomputed",
    "in_turn_saved": "**jaxoffload**, `accumulate`, all saved",
    "interleaved": "**jaxoffload**, interleaved; norms and activation recomputed",
}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    head = ("microbatches", "", "step per microbatch", "temporary device memory", "model FLOP utilisation")
    rows = []
    for count, found in sorted(result["microbatches"].items(), key=lambda item: int(item[0])):
        for mode, what in WHAT.items():
            if "ms" in (m := found["modes"].get(mode, {})):
                rows.append((count, what, f"{m['ms']:.0f} ms", f"{m['temp_gib']:.1f} GiB", percent(m["mfu"])))
    return markdown(head, *rows)


if __name__ == "__main__":
    sys.exit(main())
