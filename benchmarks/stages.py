r"""Gradients over microbatches on two pipeline stages: one schedule with residuals offloaded, saved and recomputed,
all forward passes before all backward passes by plain JAX, and FSDP.

    python -m benchmarks.stages [--microbatches 4 8 16] [--virtual_stages 1 2] [--out benchmarks/results/stages.json]
    python -m benchmarks.stages --case moe --layers 4 --microbatches 8 --out benchmarks/results/stages-moe.json
    python -m benchmarks.stages --case moe --expert 2 --d_model 2048 --heads 32 --kv_heads 4 --qk_norm --experts 128 \
        --experts_per_token 8 --d_expert 768 --capacity 1.5 --layers 16 --batch 4 --microbatches 8 --virtual_stages 2 \
        --out benchmarks/results/stages-experts.json  # Qwen3-30B-A3B's layers; each stage is two GPUs
    python -m benchmarks.stages ... --alone --out benchmarks/results/stages-alone.json  # each residual by itself

A step is the gradient of a stack of the example model's layers, summed over microbatches of `--batch` sequences each,
and an SGD update in place, as in `benchmarks.accumulate`. One process times all modes in turn, each with those of its
variants that fit on the device, and the fastest counts. Times are per microbatch, and memory is XLA's plan.

`all_forward` is a pipeline as MaxText has it: a `lax.scan` over ticks, whose layers are under `jax.checkpoint`, and a
`ppermute` between them, differentiated as a whole. It has one chunk of layers per stage.
"""

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxoffload
from benchmarks import accumulate, moe, streams
from benchmarks.accumulate import CASES, device_gib
from benchmarks.cases import OVERLAP, Case, Variant, modes_of
from benchmarks.peers import arguments, markdown, provenance, say
from benchmarks.steps import (
    NO_PLAN,
    import_te,
    layer_of,
    loss_of,
    mean_square,
    mfu,
    model_flops,
    planned_gib,
    scan_of,
    start,
)
from jaxoffload import Schedule
from jaxoffload._megatron import MODULES
from models import config
from models.sharding import RULES, make_mesh, on_mesh, param_shardings
from models.step import regrouped

STAGES = 2
OURS = ("offload", "saved", "recomputed")  # one schedule
MODES = (*OURS, "all_forward", "fsdp")
PROFILED = ("offload", "saved")


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "110")  # per device; all slots are there
    options = parse()
    import_te(options)
    case = CASES[options.case]
    result = provenance("stages", options.commit, STAGES * options.expert)
    result |= {"shape": {"case": options.case, **case.shape(options)}, "virtual_stages": {}}
    peers: dict[int, dict[str, Any]] = {count: {} for count in options.microbatches}  # they have no virtual stages
    for virtual in options.virtual_stages:
        of_count = result["virtual_stages"].setdefault(str(virtual), {"microbatches": {}})
        for count in options.microbatches:
            for modes in measured(case, options, Schedule(STAGES, virtual, count), peers[count]):
                of_count["microbatches"][str(count)] = {"modes": modes, "ratios": ratios(modes)}
                of_count |= over_microbatches(of_count["microbatches"], virtual)
                options.out.write_text(json.dumps(result, indent=1) + "\n")
            peers[count] = {mode: of for mode, of in modes.items() if mode not in OURS}
    print(table(result))


def parse() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.set_defaults(out=Path("benchmarks/results/stages.json"))
    moe.arguments(parser)
    parser.set_defaults(layers=24, seq=4096)
    parser.add_argument("--case", choices=CASES, default="dense")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--offload_only", type=int, nargs="*", default=[], help="of these, those with `offload` alone")
    parser.add_argument("--virtual_stages", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, help="by default all; with --expert ours")
    parser.add_argument("--variants", nargs="+", help="those of each mode that are timed; all by default")
    parser.add_argument("--alone", action="store_true", help="time those of `alone`, and no others")
    parser.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True, help="trace a step of each")
    options = parser.parse_args()
    options.modes = options.modes or (OURS if options.expert > 1 else MODES)
    if options.alone:
        options.modes = [*alone(options.case)]
    if options.fsdp > 1:
        parser.error("--fsdp: GPUs are stages; FSDP on two of them is the mode fsdp")
    if options.expert > 1 and (others := set(options.modes) - {*OURS}):
        parser.error(f"--modes: {', '.join(sorted(others))}: not with --expert, which is for {', '.join(OURS)}")
    names = {name for of in chosen(CASES[options.case], options).values() for name in of}
    if options.variants and (unknown := set(options.variants) - names):
        parser.error(f"--variants: {', '.join(sorted(unknown))}: not among {', '.join(sorted(names))}")
    return options


def chosen(case: Case, options: argparse.Namespace) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant, of those that the options ask for."""
    return alone(options.case) if options.alone else variants_of(case, options.case)


def variants_of(case: Case, name: str) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant."""
    moved = accumulate.variants_of(case, name)["interleaved"]
    all_moved = moved["all moved"].residuals
    saved, inputs = dict.fromkeys(all_moved, "save"), {"layer_input": "offload"}
    norm, q = {"mlp_input": "recompute"}, {"attn/q": "recompute"}
    fc1 = accumulate.MLP[name]
    gate, up = {fc1[0]: "offload"}, {fc1[1]: "recompute"}
    norm_of_qkv = {"attn/norm": "offload"}  # with fc1 what Megatron-LM calls qkv_linear and moe_act
    ours = lambda residuals: Variant("ours", residuals, OVERLAP)
    return {
        "offload": {
            **moved,
            # Two GPUs that copy both ways at once share the bus; a norm and a small product cost little. Behind one
            # pass alone, as in the first and last ticks, less than half of it all fits.
            "mlp_input recomputed, the rest moved": ours(all_moved | norm),
            "q and mlp_input recomputed, the rest moved": ours(all_moved | norm | q),
            "up and mlp_input recomputed, the rest moved": ours(all_moved | norm | up),
            # In the first ticks no stage runs a backward pass, and in the last ones none a forward pass. Behind a
            # layer's forward pass alone the gate fits, and the layer's input with it nearly does.
            "layer_input and gate moved, the rest saved": ours(saved | inputs | gate),
            "fc1 and attn/norm moved, the rest saved": ours(saved | norm_of_qkv | dict.fromkeys(fc1, "offload")),
        },
        "saved": {"all saved": ours(saved)},
        "recomputed": {"everything": ours({})},
        "all_forward": {
            **modes_of(case)["remat"],
            "all names": modes_of(case)["saved_all"]["all names, overlap"],
            "layer inputs offloaded": Variant("jax in scan", inputs, OVERLAP),
        },
        "fsdp": moved,
    }


# What is moved by itself: Megatron-LM's modules (attn_norm is the layer's input), and the two that it moves together.
DENSE = (("qkv_linear",), ("core_attn",), ("attn_norm",))
ALONE = {"dense": DENSE, "moe": (*DENSE, ("expert_fc1",), ("moe_act",), ("moe_act", "qkv_linear"))}


def alone(name: str) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant: some modules moved and all else saved; and the same residuals all saved."""
    saved = dict.fromkeys((*accumulate.MOVED, *accumulate.MLP[name]), "save")
    names = {modules: [n for module in modules for n in MODULES[module]] for modules in ALONE[name]}
    ours = lambda names, how: Variant("ours", saved | dict.fromkeys(names, how), OVERLAP)
    moved = {f"{' and '.join(modules)} alone moved": ours(of, "offload") for modules, of in names.items()}
    return {
        "offload": moved,
        "saved": {all_saved(name, v): ours(kept_besides(name, v), "save") for v in moved.values()},
    }


def kept_besides(name: str, variant: Variant) -> list[str]:
    """Return the names that a variant moves and `all saved` recomputes."""
    is_kept = {*accumulate.MOVED, *accumulate.MLP[name], "moe/fc1"}
    return [n for n, how in variant.residuals.items() if how == "offload" and n not in is_kept]


def all_saved(name: str, variant: Variant) -> str:
    """Return the variant that saves what this one keeps."""
    return " and ".join(["all", *kept_besides(name, variant)]) + " saved"


# --------------------------------------------------------------------------------------------------------------- steps


class Step(NamedTuple):
    """A compiled step, (weights, batch) -> (weights, batch), what makes its arguments, and what is known of it."""

    run: Callable[..., Any]
    initial: Callable[[], Any]
    facts: dict[str, Any]


class Lowered(NamedTuple):
    """A step before XLA compiles it, and what makes its arguments."""

    step: jax.stages.Lowered
    initial: Callable[[], Any]


class Untraced(NamedTuple):
    """A step, its abstract arguments with their shardings, and the function that computes them."""

    step: Callable[..., Any]
    args: tuple[Any, Any]
    initial: Callable[[], Any]


def step_of(case: Case, options: argparse.Namespace, mode: str, variant: Variant, schedule: Schedule) -> Untraced:
    """Return a step of a mode."""
    fsdp, virtual = mode == "fsdp", schedule.virtual_stages if mode in OURS else 1
    sizes = config.Mesh(fsdp=STAGES) if fsdp else config.Mesh(stage=STAGES, expert=options.expert)
    mesh = make_mesh(sizes, jax.devices()[: STAGES * options.expert])
    weights, x = jax.eval_shape(start(case, options))
    in_order = {"layers": weights}
    grouped = lambda w: (virtual, w.shape[0] // virtual, *w.shape[1:]) if virtual > 1 else w.shape
    stored = jax.tree.map(lambda w: jax.ShapeDtypeStruct(grouped(w), w.dtype), in_order)

    def loss(params: Any, x: Any) -> Any:
        y, _ = scan_of(case, variant)(layer_of(case, options), x, regrouped(params, in_order)["layers"])
        return mean_square(y)

    stages = {} if fsdp else {"stages": "stage", "virtual_stages": virtual}
    ours = lambda *args: jaxoffload.accumulate(loss, reduction="sum", **stages)(*args)[1]
    plain = jax.grad(functools.partial(all_forward, case, options, variant))
    gradients = plain if mode == "all_forward" else ours

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        updated = jax.tree.map(lambda w, g: w - 1e-4 / schedule.microbatches * g, params, gradients(params, batch))
        return updated, batch

    def initial() -> Any:
        weights, x = start(case, options)()
        batch = jnp.stack([jnp.roll(x, n) for n in range(schedule.microbatches)])
        return regrouped({"layers": weights}, stored), batch

    of_batch = NamedSharding(mesh, PartitionSpec(None, *RULES.spec("batch")))
    batch = jax.ShapeDtypeStruct((schedule.microbatches, *x.shape), x.dtype, sharding=of_batch)
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    args = jax.tree.map(place, stored, param_shardings(stored, mesh)), batch
    return Untraced(on_mesh(mesh, step), args, initial)


def lowered(case: Case, options: argparse.Namespace, mode: str, variant: Variant, schedule: Schedule) -> Lowered:
    """Trace a step of a mode."""
    step, args, initial = step_of(case, options, mode, variant, schedule)
    where = jax.tree.map(lambda x: x.sharding, args)
    how = {"in_shardings": where, "out_shardings": where, "donate_argnums": 0, "compiler_options": variant.options}
    return Lowered(jax.jit(step, **how).lower(*args), jax.jit(initial, out_shardings=where))


def compiled(traced: Lowered) -> Step | str:
    """Compile a step, or return why XLA cannot, or does not say what memory it planned.

    JAX's own offload in a pipeline is an error of XLA (jaxlib 0.11.2).
    """
    try:
        program = traced.step.compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error)[:300]
    facts = planned_gib(program)
    return NO_PLAN if facts is None else Step(program, traced.initial, facts)


def all_forward(case: Case, options: argparse.Namespace, variant: Variant, params: Any, batch: Any) -> Any:
    """The sum of the losses of all microbatches, which pass the stages one after another."""
    count, last = len(batch), STAGES - 1

    def on_stage(weights: Any, batch: Any) -> Any:
        stage = lax.axis_index("stage")

        def tick(x: Any, number: Any) -> tuple[Any, Any]:
            entering = lax.dynamic_index_in_dim(batch, jnp.minimum(number, count - 1), keepdims=False)
            y, _ = scan_of(case, variant)(layer_of(case, options), jnp.where(stage == 0, entering, x), weights)
            return lax.ppermute(y, "stage", [(n, n + 1) for n in range(last)]), y

        _, ys = lax.scan(tick, jnp.zeros_like(batch[0]), jnp.arange(count + last))
        losses = jax.vmap(mean_square)(ys[last:])
        return lax.psum(jnp.where(stage == last, jnp.sum(losses), 0.0), "stage")

    specs = (PartitionSpec("stage"), PartitionSpec())
    mapped = jax.shard_map(on_stage, in_specs=specs, out_specs=PartitionSpec(), axis_names={"stage"}, check_vma=False)
    return mapped(params["layers"], batch)


# ------------------------------------------------------------------------------------------------------------- measure


def measured(
    case: Case, options: argparse.Namespace, schedule: Schedule, known: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield, after each mode, mode -> the results of its fastest variant, with those of the others.

    `known`: results of some modes.
    """
    found: dict[str, dict[str, Any]] = dict(known)
    modes = ["offload"] if schedule.microbatches in options.offload_only else options.modes
    steps = compiled_steps(case, options, [mode for mode in modes if mode not in known], schedule)
    for mode, of_mode in steps.items():
        variants: dict[str, Any] = {}
        for name, step in of_mode.items():
            if isinstance(step, str):
                variants[name] = {"failed": step}
                continue
            runs = step.facts["all_gib"] <= device_gib() and name in (options.variants or of_mode)
            try:
                times = timed(case, options, step, schedule, options.profile and mode in PROFILED) if runs else {}
            except jax.errors.JaxRuntimeError as error:  # NCCL's, say
                times = {"failed": str(error)[:300]}
            variants[name] = step.facts | times
            say(
                f"{schedule.virtual_stages} virtual stages, {schedule.microbatches} microbatches, {mode}, {name}: "
                f"{ {key: value for key, value in variants[name].items() if key != 'profile'} }"
            )
        ran = {name: facts for name, facts in variants.items() if "ms" in facts}
        best = min(ran, key=lambda name: ran[name]["ms"]) if ran else None
        others = {name: facts for name, facts in variants.items() if name != best}
        found[mode] = ({"options": best, **ran[best]} if best else {}) | {"other_options": others}
        if {"saved", "offload"} <= found.keys() and "freed" not in found["offload"]:
            names = chosen(case, options)["offload"] if options.alone else [compared(options)]
            each = {name: freed(case, options, schedule, found, name) for name in names}
            found["offload"]["freed"] = {name: facts for name, facts in each.items() if facts}
        yield found


def compiled_steps(
    case: Case, options: argparse.Namespace, modes: list[str], schedule: Schedule
) -> dict[str, dict[str, Step | str]]:
    """Return mode -> variant -> its step. Threads compile them: one after another they take minutes."""
    planned = (("offload", compared(options)), ("saved", "all saved"))
    wanted = lambda mode, name: name in (options.variants or [name]) or (mode, name) in planned
    keys = [
        (mode, name, variant)
        for mode in modes
        for name, variant in chosen(case, options)[mode].items()
        if wanted(mode, name)
    ]
    traced = [lowered(case, options, mode, variant, schedule) for mode, _, variant in keys]
    steps: dict[str, dict[str, Step | str]] = {mode: {} for mode in modes}
    with ThreadPoolExecutor(max_workers=8) as threads:
        for (mode, name, _), step in zip(keys, threads.map(compiled, traced), strict=True):
            steps[mode][name] = step
    return steps


def timed(
    case: Case, options: argparse.Namespace, step: Step, schedule: Schedule, with_profile: bool
) -> dict[str, Any]:
    """Return the times of a step, per microbatch. The first run fills the pinned pool."""
    state, spent = step.initial(), []
    for _ in range(1 + options.steps):
        begin = time.perf_counter()
        state = jax.block_until_ready(step.run(*state))
        spent.append(1e3 * (time.perf_counter() - begin) / schedule.microbatches)
    ms = statistics.median(spent[1:])
    flops = model_flops(case, options) / STAGES / options.expert
    times = {
        "ms": round(ms, 2),
        "spread_ms": [round(min(spent[1:]), 2), round(max(spent[1:]), 2)],
        "mfu": mfu(flops, ms),
    }
    if with_profile:
        gpus = streams.traced(lambda: jax.block_until_ready(step.run(*state)))
        times["profile"] = [streams.summary(events) for events in gpus.values()]  # none on a CPU
    return times


def compared(options: argparse.Namespace) -> str:
    """Return the variant whose memory `freed` compares with that of saving all, whether they run or not."""
    moving = chosen(CASES[options.case], options)["offload"]
    return next((name for name in options.variants or [] if name in moving), "all moved")


def timed_as(of_mode: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the facts of a variant among the results of its mode."""
    return of_mode if of_mode.get("options") == name else of_mode["other_options"][name]


def freed(
    case: Case, options: argparse.Namespace, schedule: Schedule, found: dict[str, Any], name: str
) -> dict[str, Any]:
    """Return what offloading frees on each device, by XLA's plans, and what is predicted.

    In each slot a chunk's residuals, in whose place the device holds those in flight. XLA schedules the programs in its
    own way, so what else they need is not the same: jaxlib 0.11.2 has up to a layer more under way where all are saved,
    0.12 has not.
    """
    variant = chosen(case, options)["offload"][name]
    table = jaxoffload.residuals(loss_of(case, options, variant), *jax.eval_shape(start(case, options))).per_device
    layer = sum(row.bytes_per_layer for row in table if row.state == "offloaded" and row.kind == "value")
    of_chunk = case.model(options).layers // schedule.chunks
    layers = schedule.slots * of_chunk - schedule.layers_in_flight(of_chunk)
    base = all_saved(options.case, variant)
    saved, offloaded = (timed_as(*of).get("temp_gib") for of in ((found["saved"], base), (found["offload"], name)))
    if saved is None or offloaded is None:
        return {}
    planned, predicted = saved - offloaded, layers * layer / 2**30
    return {
        "from": base,
        "freed_gib": round(planned, 4),
        "predicted_gib": round(predicted, 4),
        "freed/predicted": round(planned / predicted, 4),
    }


# ------------------------------------------------------------------------------------------------------------- report


def ratios(modes: dict[str, Any]) -> dict[str, float]:
    """Return every ratio for which the modes were measured. won_back: as in `benchmarks.accumulate`."""
    ms = {mode: of["ms"] for mode, of in modes.items() if "ms" in of}
    found = {f"offload/{mode}": ms["offload"] / ms[mode] for mode in MODES[1:] if {"offload", mode} <= ms.keys()}
    found |= {
        f"offload/{mode} by temp_gib": modes["offload"]["temp_gib"] / modes[mode]["temp_gib"]
        for mode in MODES[1:]
        if {"offload", mode} <= ms.keys()
    }
    if {"offload", "saved", "recomputed"} <= ms.keys():
        found["won_back"] = (ms["recomputed"] - ms["offload"]) / (ms["recomputed"] - ms["saved"])
    freed = modes.get("offload", {}).get("freed", {})
    for name, of in freed.items():
        found["freed/predicted" + f", {name}" * (len(freed) > 1)] = of["freed/predicted"]
        if len(freed) > 1 and "ms" in (run := timed_as(modes["offload"], name)) and "saved" in ms:
            found[f"{name}/saved"] = run["ms"] / ms["saved"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def over_microbatches(microbatches: dict[str, Any], virtual: int) -> dict[str, Any]:
    """Return what shows only where the number of microbatches varies: memory, and how long stages idle.

    The time that a microbatch adds, from the fewest to the most microbatches, is that of a stage that never idles.
    """
    of = {int(count): found["modes"].get("offload", {}) for count, found in microbatches.items()}
    ran = sorted(count for count, facts in of.items() if "ms" in facts)
    if len(ran) < 2:
        return {}
    least, most = ran[0], ran[-1]
    step_ms = {count: count * of[count]["ms"] for count in ran}
    each = (step_ms[most] - step_ms[least]) / (most - least)
    bubbles = {
        str(count): {
            "measured": round(1 - count * each / step_ms[count], 4),
            "by the formula": round(Schedule(STAGES, virtual, count).bubble, 4),
        }
        for count in ran
    }
    memory = of[most]["temp_gib"] / of[least]["temp_gib"]
    return {"bubble": bubbles, f"temp_gib with {most} / with {least} microbatches": round(memory, 4)}


WHAT = {
    "offload": "**jaxoffload**",
    "saved": "the same schedule",
    "recomputed": "the same schedule, recomputed",
    "all_forward": "JAX, all forward, then all backward",
    "fsdp": "**jaxoffload**, FSDP, interleaved",
}


def table(result: dict[str, Any]) -> str:
    """Return the results of all that ran as a Markdown table: a line for each choice, a column for each schedule."""
    cells: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for virtual, of in result["virtual_stages"].items():
        shown = OURS if columns else MODES  # the others have no virtual stages
        for count, found in sorted(of["microbatches"].items(), key=lambda item: int(item[0])):
            columns.append(f"v={virtual}, M={count}")
            for mode in shown:
                best = found["modes"].get(mode, {"other_options": {}})
                for name, m in {best.get("options", ""): best, **best["other_options"]}.items():
                    if "ms" in m:
                        row = cells.setdefault(f"{WHAT[mode]}: {name}", {})
                        row[columns[-1]] = f"{m['ms']:.0f} ms, {m['temp_gib']:.1f} GiB"
    rows = ((name, *(row.get(column, "") for column in columns)) for name, row in cells.items())
    return markdown(("", *columns), *rows)


if __name__ == "__main__":
    sys.exit(main())
