r"""Gradients over microbatches on two pipeline stages: one schedule with residuals offloaded, saved and recomputed,
all forward passes before all backward passes by plain JAX, and FSDP.

    python -m benchmarks.stages [--microbatches 4 8 16] [--virtual_stages 1 2] [--out benchmarks/results/stages.json]
    python -m benchmarks.stages --case moe --layers 4 --microbatches 8 --out benchmarks/results/stages-moe.json
    python -m benchmarks.stages ... --alone --out benchmarks/results/stages-alone.json  # each residual by itself

Steps and times are those of `benchmarks.accumulate`. `all_forward` is a pipeline as MaxText has it: a `lax.scan` over
ticks, whose layers are under `jax.checkpoint`, and a `ppermute` between them, differentiated as a whole. It has one
chunk of layers per stage.
"""

import argparse
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxoffload
from benchmarks import accumulate, bench, cases
from benchmarks.bench import GIB, Variant, cells, markdown
from benchmarks.cases import OVERLAP, Case, in_microbatches, layer_of, mean_square, ours, scan_of, update
from benchmarks.dense import modes_of
from benchmarks.moe import CASES
from jaxoffload import Schedule
from jaxoffload._megatron import MODULES
from models import config
from models.sharding import RULES, make_mesh, on_mesh, param_shardings
from models.step import regrouped

STAGES = 2
OURS = ("offload", "saved", "recomputed")  # one schedule
MODES = (*OURS, "all_forward", "fsdp")
# What is moved by itself: Megatron-LM's modules (attn_norm is the layer's input), and the two that it moves together.
DENSE = (("qkv_linear",), ("core_attn",), ("attn_norm",))
ALONE = {"dense": DENSE, "moe": (*DENSE, ("expert_fc1",), ("moe_act",), ("moe_act", "qkv_linear"))}


def variants_of(case: Case) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant."""
    moved = accumulate.variants_of(case)["interleaved"]
    all_moved, saved = (dict.fromkeys(case.moved, how) for how in ("offload", "save"))
    inputs, norm, q = {"layer_input": "offload"}, {"mlp_input": "recompute"}, {"attn/q": "recompute"}
    gate, up = {case.fc1[0]: "offload"}, {case.fc1[1]: "recompute"}
    norm_of_qkv = {"attn/norm": "offload"}  # with fc1 what Megatron-LM calls qkv_linear and moe_act
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
            "fc1 and attn/norm moved, the rest saved": ours(saved | norm_of_qkv | dict.fromkeys(case.fc1, "offload")),
        },
        "saved": {"all saved": ours(saved)},
        "recomputed": {"everything": ours({})},
        "all_forward": {
            **modes_of(case)["remat"],
            "all names": modes_of(case)["saved_all"]["all names, overlap"],
            "layer inputs offloaded": Variant("jax in scan", inputs, OVERLAP),  # an error of XLA (jaxlib 0.11.2)
        },
        "fsdp": moved,
    }


def alone(case: Case) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant: some modules moved and all else saved; and the same residuals all saved."""
    saved = dict.fromkeys(case.moved, "save")
    names = {modules: [name for module in modules for name in MODULES[module]] for modules in ALONE[case.program]}
    moved = {f"{' and '.join(of)} alone moved": ours(saved | dict.fromkeys(names[of], "offload")) for of in names}
    kept = {all_saved(case, v): ours(dict.fromkeys(v.residuals, "save")) for v in moved.values()}
    return {"offload": moved, "saved": kept, "recomputed": {}}


def all_saved(case: Case, variant: Variant) -> str:
    """Return the name of the variant that saves what this one keeps, perhaps more than `all saved` does."""
    known = {*case.moved, case.fc1[0].removesuffix(".gate")}
    return " and ".join(["all", *(name for name in variant.residuals if name not in known)]) + " saved"


def parse() -> argparse.Namespace:
    more = {"modes": [*MODES], "variants": [], "rounds": 0, "profile": ["offload", "saved"], "alone": False}
    # Of `offload_only` microbatches there is only `offload`.
    more |= {"case": "dense", "microbatches": [4, 8, 16], "offload_only": [0], "virtual_stages": [1, 2]}
    options = bench.parser(__doc__, "stages", **cases.SIZES | {"layers": 24, "seq": 4096}, **more).parse_args()
    if options.expert > 1 or options.alone:  # the others have neither
        options.modes = [mode for mode in options.modes if mode in OURS]
    return options


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    case = CASES[options.case]
    variants = bench.chosen(alone(case) if options.alone else variants_of(case), options)
    for virtual, count in itertools.product(options.virtual_stages, options.microbatches):
        path = ("virtual_stages", str(virtual), "microbatches", str(count))
        for modes in (OURS, ("all_forward",), ("fsdp",)):  # each has another state
            few = count in options.offload_only or (modes != OURS and virtual != options.virtual_stages[0])
            some = {key: v for key, v in variants.items() if key[0] in modes and (key[0] == "offload" or not few)}
            if some:
                yield group_of(case, options, Schedule(STAGES, virtual, count), some, path)


def group_of(
    case: Case, options: argparse.Namespace, schedule: Schedule, variants: dict[bench.Key, Variant], path: Any
) -> bench.Group:
    """Return the steps of one schedule, with what each variant of `offload` is predicted to free."""
    made = {key: step_of(case, options, key[0], variant, schedule) for key, variant in variants.items()}
    traced = {key: bench.lowered(step, args, variants[key].options) for key, (step, args, _) in made.items()}
    steps = bench.compile_all(traced)
    for (mode, name), step in steps.items():
        if mode == "offload":
            freed = freed_gib(case, options, schedule, variants[mode, name])
            step.facts.update({"freed_gib": freed, "from": all_saved(case, variants[mode, name])})
    _, args, initial = next(iter(made.values()))
    placed = jax.jit(initial, out_shardings=jax.tree.map(lambda x: x.sharding, args))
    count = schedule.microbatches
    return bench.Group(path, steps, placed, count * cases.model_flops(case, options) / STAGES, count)


def step_of(
    case: Case, options: argparse.Namespace, mode: str, variant: Variant, schedule: Schedule
) -> tuple[Callable[..., Any], tuple[Any, Any], Callable[[], Any]]:
    """Return a step of a mode, its abstract arguments with shardings, and the function that makes them."""
    fsdp, virtual = mode == "fsdp", schedule.virtual_stages if mode in OURS else 1
    sizes = config.Mesh(fsdp=STAGES) if fsdp else config.Mesh(stage=STAGES, expert=options.expert)
    mesh = make_mesh(sizes, jax.devices()[: STAGES * options.expert])
    weights, _ = jax.eval_shape(cases.start(case, options))
    in_order = {"layers": weights}
    grouped = lambda w: (virtual, w.shape[0] // virtual, *w.shape[1:]) if virtual > 1 else w.shape
    stored = jax.tree.map(lambda w: jax.ShapeDtypeStruct(grouped(w), w.dtype), in_order)

    def loss(params: Any, x: Any) -> Any:
        y, _ = scan_of(case, variant)(layer_of(case, options), x, regrouped(params, in_order)["layers"])
        return mean_square(y)

    def initial() -> Any:
        weights, x = cases.start(case, options)()
        return regrouped({"layers": weights}, stored), in_microbatches(x, schedule.microbatches)

    stages = {} if fsdp else {"stages": "stage", "virtual_stages": virtual}
    plain = jax.grad(functools.partial(all_forward, case, options, variant))
    gradients = plain if mode == "all_forward" else cases.accumulated(loss, **stages)
    of_batch = NamedSharding(mesh, PartitionSpec(None, *RULES.spec("batch")))
    args = cases.placed(jax.eval_shape(initial), (param_shardings(stored, mesh), of_batch))
    return on_mesh(mesh, update(gradients, schedule.microbatches)), args, initial


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


def freed_gib(case: Case, options: argparse.Namespace, schedule: Schedule, variant: Variant) -> float:
    """Return what offloading is predicted to free on each device: in each slot a chunk's residuals, in whose place the
    device holds those in flight.

    XLA schedules the programs in its own way, so what else they need is not the same: jaxlib 0.11.2 has up to a layer
    more under way where all are saved, 0.12 has not.
    """
    loss, avals = cases.loss_of(case, options, variant), jax.eval_shape(cases.start(case, options))
    rows = jaxoffload.residuals(loss, *avals).per_device
    layer = sum(row.bytes_per_layer for row in rows if row.state == "offloaded" and row.kind == "value")
    of_chunk = options.layers // schedule.chunks
    return (schedule.slots * of_chunk - schedule.layers_in_flight(of_chunk)) * layer / GIB


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return `bench.ratios`, and what each variant of `offload` frees, by XLA's plans, of what is predicted."""
    found = bench.ratios(modes, [("offload", mode) for mode in MODES[1:]], "offload", "recomputed", ["saved"])
    moved, saved = (by_name(modes.get(mode, {})) for mode in ("offload", "saved"))
    for name, of in moved.items():
        if of.get("freed_gib") and "temp_gib" in of.keys() & (base := saved.get(of["from"], {})).keys():
            found[f"freed/predicted, {name}"] = round((base["temp_gib"] - of["temp_gib"]) / of["freed_gib"], 4)
    return found


def by_name(mode: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of each variant of a mode."""
    return ({mode["options"]: mode} if "options" in mode else {}) | mode.get("other_options", {})


WHAT = {
    "offload": "**jaxoffload**",
    "saved": "the same schedule",
    "recomputed": "the same schedule, recomputed",
    "all_forward": "JAX, all forward, then all backward",
    "fsdp": "**jaxoffload**, FSDP, interleaved",
}


def table(result: dict[str, Any]) -> str:
    """Return the results of all that ran as a Markdown table: a line for each choice, a column for each schedule."""
    rows: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for virtual, of in result["virtual_stages"].items():
        shown = OURS if columns else MODES  # the others have no virtual stages
        for count, found in sorted(of["microbatches"].items(), key=lambda item: int(item[0])):
            columns.append(f"v={virtual}, M={count}")
            for mode in shown:
                for name, m in by_name(found["modes"].get(mode, {})).items():
                    if "ms" in m:
                        rows.setdefault(f"{WHAT[mode]}: {name}", {})[columns[-1]] = ", ".join(cells(m)[:2])
    return markdown(("", *columns), *((name, *(row.get(of, "") for of in columns)) for name, row in rows.items()))


if __name__ == "__main__":
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "110")  # per device; all slots are there
    options = parse()
    bench.prepare(options.attention, options.grouped)
    shape = cases.shape_of(options)
    print(table(bench.main("stages", options, groups, ratios, devices=STAGES, shape=shape)))
