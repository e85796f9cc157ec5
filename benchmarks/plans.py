"""Plans against measured policies: step time and memory, predicted and measured, at three budgets for each shape.

    python -m benchmarks.plans predict --machine machines/h200.json [--out benchmarks/predicted/plans.json]
    python -m benchmarks.plans measure [--predicted FILE] [--shapes NAME ...] [--out benchmarks/results/plans.json]
    python -m benchmarks.plans join FILE ... [--out benchmarks/results/plans.json]

The first needs no GPU. It writes down, for each shape, all choices that no other one beats, and the best ones that move
nothing, with the step time and the memory that are predicted from shapes alone; its file is committed before the second
runs. The second has three budgets for each shape: 2 % more than recomputing everything takes by XLA's plan, what the
fastest choice takes, and the middle. For each it finds the plan as `plan(compile=True)` does, among the choices that
were written down. It measures these plans, the hand-made candidates of the other benchmarks, and `--drawn` policies
drawn at random, all in one process, in turn; those that are nearly the fastest in their memory more often. A policy
fits in a budget by XLA's plan, which is compared with the allocator's peak. The plan is compared with the fastest
policy that fits. The third makes one file of those of several runs.
"""

import argparse
import dataclasses
import importlib
import json
import operator
import os
import random
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxoffload
from benchmarks import dense, moe, peers
from benchmarks.accumulate import device_gib, placed
from benchmarks.cases import OVERLAP, Case, Variant
from benchmarks.steps import initial, loss_of, shardings, start
from jaxoffload import Policy

GIB = 2**30


class Shape(NamedTuple):
    """The layers of a case with sizes of their own, in so many microbatches."""

    case: Case
    sizes: dict[str, Any]
    microbatches: int = 1


def both(name: str, case: Case, microbatches: int = 4, **sizes: Any) -> dict[str, Shape]:
    """Return a shape, and the same in microbatches."""
    return {name: Shape(case, sizes), f"{name}, accumulated": Shape(case, sizes, microbatches)}


SHAPES = {
    **both("8b", dense.CASE, layers=8),
    **both("70b", dense.CASE, d_model=8192, layers=6, batch=1),
    **both("1b", dense.CASE, d_model=2048, layers=8, batch=4),
    **both("small heads", dense.CASE, d_model=2048, layers=8, head_dim=64, kv_heads=8, batch=4),
    **both("mixtral", moe.CASE, layers=3),
    **both("small experts", moe.CASE, layers=6, d_model=2048, experts=64, experts_per_token=8, d_expert=768),
    **both("8b, te", dense.CASE, layers=8, attention="te"),
    **both("8b, fsdp", dense.CASE, layers=8, batch=4, fsdp=2),
}


def main() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    options = parse()
    if options.what == "join":
        return write(options, joined([json.loads(file.read_text()) for file in options.files], options.out))
    if options.what == "predict":
        jax.config.update("jax_num_cpu_devices", gpus_of(options.shapes))
        return predict(options)
    if any(SHAPES[name].sizes.get("attention") == "te" for name in options.shapes):
        importlib.import_module("transformer_engine.jax")  # before JAX's first computation
    read = json.loads(options.predicted.read_text())
    result = peers.provenance("plans", options.commit, gpus_of(options.shapes))
    result |= {"predicted": str(options.predicted), "shapes": {}}
    for name in options.shapes:
        result["shapes"][name] = measured(name, read["shapes"][name], options)
        result["summary"] = summary(result["shapes"])
        write(options, result)  # so that a later failure loses nothing
    return print(json.dumps(result["summary"], indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    join = commands.add_parser("join")
    join.add_argument("files", nargs="+", type=Path)
    join.add_argument("--out", type=Path, default=Path("benchmarks/results/plans.json"))
    for what, folder in (("predict", "predicted"), ("measure", "results")):
        command = commands.add_parser(what)
        command.add_argument("--out", type=Path, default=Path(f"benchmarks/{folder}/plans.json"))
        command.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
        command.add_argument("--sizes", type=json.loads, default={}, help="of all shapes, as JSON: for a trial run")
        command.add_argument("--commit", default=peers.head(), help="the commit to record")
    commands.choices["predict"].add_argument("--machine", type=Path, default=Path("machines/h200.json"))
    measure = commands.choices["measure"]
    measure.add_argument("--predicted", type=Path, default=Path("benchmarks/predicted/plans.json"))
    measure.add_argument("--drawn", type=int, default=20, help="policies drawn at random for each shape")
    measure.add_argument("--rounds", type=int, default=4, help="of the contenders; the others run once")
    return parser.parse_args()


def gpus_of(shapes: Iterable[str]) -> int:
    """Return how many GPUs the largest of these takes."""
    return max(SHAPES[name].sizes.get("fsdp", 1) for name in shapes)


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def options_of(shape: Shape, sizes: dict[str, Any]) -> argparse.Namespace:
    """Return the options of the case's own benchmark. Without a GPU kernels are traced as the report traces them."""
    parser = peers.arguments("")
    shape.case.arguments(parser)
    parser.set_defaults(**shape.sizes | sizes)
    options = parser.parse_args([])
    if jax.default_backend() != "gpu":
        options.attention = "cudnn" if options.attention == "te" else options.attention
        options.grouped = "ragged"
    return options


def step_of(shape: Shape, options: argparse.Namespace, variant: Variant) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a step, (weights, x) -> (weights, x), with a leading axis of microbatches if there are several."""
    loss, count = loss_of(shape.case, options, variant), shape.microbatches
    accumulated = jaxoffload.accumulate(loss, reduction="sum")

    def step(weights: Any, x: Any) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(weights, x) if count == 1 else accumulated(weights, x)[1]
        return jax.tree.map(lambda w, g: w - 1e-4 / count * g, weights, gradients), x

    return step


def arguments(shape: Shape, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the abstract arguments of a step, with shardings."""
    weights, x = jax.eval_shape(start(shape.case, options))
    if shape.microbatches > 1:
        x = jax.ShapeDtypeStruct((shape.microbatches, *x.shape), x.dtype)
    of = lambda aval, sharding: jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
    of_weights, of_x = (placed if shape.microbatches > 1 else shardings)(shape.case, options)
    one_for_all = isinstance(of_weights, jax.sharding.Sharding)
    each = jax.tree.map(lambda _: of_weights, weights) if one_for_all else of_weights
    return jax.tree.map(of, weights, each), of(x, of_x)


def variant_of(policy: Policy) -> Variant:
    fields = dataclasses.asdict(policy)
    residuals = dict(policy.residuals)
    return Variant("ours", residuals, OVERLAP, tuple((k, v) for k, v in fields.items() if k != "residuals"))


# ------------------------------------------------------------------------------------------------------------- predict


def predict(options: argparse.Namespace) -> None:
    """Write the choices for all shapes."""
    machine = jaxoffload.proof.Machine.from_json(options.machine.read_text())
    result = peers.provenance("plans", options.commit) | {"machine": json.loads(machine.to_json()), "shapes": {}}
    for name in options.shapes:
        shape = SHAPES[name]
        sizes = options_of(shape, options.sizes)
        step, args = step_of(shape, sizes, Variant("ours", {}, OVERLAP)), arguments(shape, sizes)
        begin = time.perf_counter()
        plan = jaxoffload.plan(step, *args, budget="100TiB", machine=machine)
        seconds = time.perf_counter() - begin
        unmoved = jaxoffload.plan(step, *args, budget="100TiB", host_budget=0, machine=machine)
        result["shapes"][name] = {
            "sizes": {key: value for key, value in vars(sizes).items() if key not in ("out", "commit", "steps")},
            "microbatches": shape.microbatches,
            "seconds to plan": round(seconds, 2),
            "curve": json.loads(plan.to_json())["curve"],
            "unmoved": json.loads(unmoved.to_json())["curve"],
        }
        write(options, result)
        peers.say(f"{name}: planned in {seconds:.1f} s")


# ------------------------------------------------------------------------------------------------------------- measure


def drawn(case: Case, count: int) -> dict[str, Policy]:
    """Return policies drawn at random, always the same ones: a decision for each name, and how many layers offload."""
    made = {}
    for seed in range(count):
        dice = random.Random(seed)
        residuals = {name: dice.choice(["save", "offload", "recompute"]) for name in case.all_names}
        how = {
            "offload_layers": dice.choice(["all", 0.25, 0.5, 0.75]),
            "other_layers": dice.choice(["save", "recompute"]),
        }
        made[f"drawn {seed}"] = Policy(residuals, **how)
    return made


def measured(name: str, found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return step time and memory of the plans and of all other policies of a shape."""
    shape = SHAPES[name]
    sizes = options_of(shape, options.sizes)
    every = {"recompute": Variant("ours", {}, OVERLAP)} | shape.case.best
    every |= {"save": Variant("ours", dict.fromkeys(shape.case.all_names, "save"), OVERLAP)}
    every |= {key: variant_of(policy) for key, policy in drawn(shape.case, options.drawn).items()}
    curve = Curve(shape, sizes, found["curve"], found["unmoved"])
    traced = [lowered(shape, sizes, variant) for variant in every.values()]
    with ThreadPoolExecutor(max_workers=8) as threads:  # one after another they take most of the time
        of_all = threads.submit(curve.size, curve.first[-1])
        both = dict(zip(every, threads.map(compiled, traced), strict=True))
        most = min((of_all.result() or 0) / GIB, device_gib())
        budgets = budgets_of(both["recompute"][1]["device_gib"], most)
        chosen = dict(zip(budgets, threads.map(curve.chosen, budgets.values()), strict=True))
    both |= {f"plan {which}": curve.compiled[point] for which, point in chosen.items() if point}
    steps, lines = {key: step for key, (step, _) in both.items()}, {key: {**line} for key, (_, line) in both.items()}
    peers.say(f"{name}: compiled, {lines}")
    timed(shape, sizes, steps, lines, options.rounds)
    judgments = {which: judged(budget, lines.get(f"plan {which}"), lines) for which, budget in budgets.items()}
    return {"budgets": judgments, "policies": lines}


def budgets_of(least: float, most: float) -> dict[str, float]:
    """Return three budgets in GiB, from what recomputing everything and the fastest choice take."""
    least = round(1.02 * least, 4)
    return {"least": least, "middle": round((least + max(most, least)) / 2, 4), "all": round(max(most, least), 4)}


class Point(NamedTuple):
    """A choice on a predicted curve, as `refined` takes it."""

    ns: int
    device: int
    host: int
    number: int


class Curve:
    """The predicted choices for a shape, and those that move nothing. Each is compiled once, whatever threads ask for
    it."""

    def __init__(self, shape: Shape, sizes: argparse.Namespace, curve: list[Any], unmoved: list[Any]):
        self.shape, self.sizes, self.curve = shape, sizes, curve + [of for of in unmoved if of not in curve]
        self.points = [Point(round(1e6 * of["ms"]), of["bytes"], 0, number) for number, of in enumerate(self.curve)]
        self.first, self.unmoved = self.points[: len(curve)], [self.points[self.curve.index(of)] for of in unmoved]
        self.compiled: dict[Point, tuple[Any, dict[str, Any]]] = {}
        self.locks = {point: threading.Lock() for point in self.points}

    def size(self, point: Point) -> int | None:
        """Return the bytes per device that XLA plans."""
        with self.locks[point]:
            if point not in self.compiled:
                of = self.curve[point.number]
                step, line = compiled(lowered(self.shape, self.sizes, variant_of(Policy(**of["policy"]))))
                predicted = {"predicted_ms": round(of["ms"], 2), "predicted_gib": round(of["bytes"] / GIB, 4)}
                self.compiled[point] = step, line | predicted | {"policy": of["policy"]}
        gib = self.compiled[point][1].get("device_gib")
        return None if gib is None else round(gib * GIB)

    def chosen(self, budget: float) -> Point | None:
        """Return the fastest of these that takes at most so many GiB by XLA's plan."""
        fits = lambda point: (size := self.size(point)) is not None and size <= budget * GIB
        return next(filter(fits, sorted(self.points)), None)


def lowered(shape: Shape, options: argparse.Namespace, variant: Variant) -> jax.stages.Lowered:
    """Trace a step."""
    args = arguments(shape, options)
    where = jax.tree.map(lambda aval: aval.sharding, args)
    how = {"in_shardings": where, "out_shardings": where, "donate_argnums": 0, "compiler_options": variant.options}
    return jax.jit(step_of(shape, options, variant), **how).lower(*args)


def compiled(traced: jax.stages.Lowered) -> tuple[Any, dict[str, Any]]:
    """Return a compiled step, or None where it needs more than the device has; and what is known of it."""
    try:
        program = traced.compile()
    except (jax.errors.JaxRuntimeError, MemoryError) as why:
        return None, {"error": str(why)[:200]}
    if (memory := jaxoffload.proof.memory_plan(program)) is None:
        return None, {"error": "XLA does not say what memory it planned"}
    size = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    size += memory.output_size_in_bytes - memory.alias_size_in_bytes
    line = {"device_gib": round(size / GIB, 4), "host_gib": round(memory.host_temp_size_in_bytes / GIB, 4)}
    return (program if line["device_gib"] <= device_gib() else None), line


def timed(shape: Shape, options: argparse.Namespace, steps: dict[str, Any], lines: dict[str, Any], rounds: int) -> None:
    """Add the median time of each step to its line, and the peak of allocated memory.

    The first round fills the pinned pool. It begins with the smallest step, because the allocator does not reset its
    peak: that of a step is known if no step before took as much. After the second round only `contenders` go on.
    """
    weights, x = initial(shape.case, options)
    if shape.microbatches > 1:
        stack = lambda x: jnp.stack([jnp.roll(x, n) for n in range(shape.microbatches)])
        x = jax.jit(stack, out_shardings=placed(shape.case, options)[1])(x)
    state, spent = (weights, x), {key: [] for key, step in steps.items() if step}
    del weights, x  # or they count in the peak of all steps but the first
    by_size = sorted(spent, key=lambda key: (lines[key]["device_gib"], not key.startswith("plan ")))
    for number in range(rounds + 1):
        for key in contenders(lines) if number > 1 else by_size:
            before, begin = peers.peak_gib(), time.perf_counter()
            try:
                state = jax.block_until_ready(steps[key](*state))
            except jax.errors.JaxRuntimeError as why:
                sys.exit(f"{key} failed, and took the weights with it: {why}")
            if number:
                spent[key].append(1e3 * (time.perf_counter() - begin))
                lines[key]["step_ms"] = round(statistics.median(spent[key]), 2)
            elif (peak := peers.peak_gib()) > before:
                lines[key]["peak_gib"] = peak


def contenders(lines: dict[str, Any]) -> list[str]:
    """Return the steps that take at most 4 % longer than the fastest in their memory, and the plans."""
    ran = {key: of for key, of in lines.items() if "step_ms" in of}
    fastest = lambda gib: min(of["step_ms"] for of in ran.values() if of["device_gib"] <= gib)
    close = lambda of: of["step_ms"] <= 1.04 * fastest(of["device_gib"])
    return [key for key, of in ran.items() if close(of) or key.startswith("plan ")]


def judged(budget: float, plan: dict[str, Any] | None, lines: dict[str, Any]) -> dict[str, Any]:
    """Return the plan for a budget in GiB beside the fastest of all policies that fit in it, and beside its
    prediction."""
    fitting = {key: of for key, of in lines.items() if "step_ms" in of and of["device_gib"] <= budget}
    best = min(fitting, key=lambda key: fitting[key]["step_ms"], default=None)
    result = {"budget_gib": budget, "best": best, "runs": plan is not None and "step_ms" in plan}
    if plan and best and result["runs"]:
        result |= {
            "plan / best": round(plan["step_ms"] / fitting[best]["step_ms"], 4),
            "predicted / measured ms": round(plan["predicted_ms"] / plan["step_ms"], 4),
            "predicted / planned by XLA": round(plan["predicted_gib"] / plan["device_gib"], 4),
        }
        if "peak_gib" in plan:
            result["planned by XLA / peak"] = round(plan["device_gib"] / plan["peak_gib"], 4)
    return result


def joined(results: list[dict[str, Any]], out: Path) -> dict[str, Any]:
    """Return the results of several runs as one, for the file `out`. They are of one kind of device, with the same
    predictions and versions; a package may be missing from some. The commit is that of the last run."""
    kind = lambda result: result["device"].partition(" ")[2]  # without how many
    versions = {package: version for result in results for package, version in result["versions"].items()}
    same = {"device": kind, "predicted": operator.itemgetter("predicted")}
    same |= {package: lambda result, of=package: result["versions"].get(of, versions[of]) for package in versions}
    for key, of in same.items():
        if len(found := dict.fromkeys(map(of, results))) > 1:
            sys.exit(f"the files differ in {key!r}: {', '.join(map(repr, found))}")
    measured = [name for result in results for name in result["shapes"]]
    if twice := {name for name in measured if measured.count(name) > 1}:
        sys.exit(f"measured more than once: {', '.join(sorted(twice))}")
    every = {name: of for result in results for name, of in result["shapes"].items()}
    shapes = {name: every[name] for name in SHAPES if name in every}
    paths = ["--predicted", results[-1]["predicted"], "--out", str(out)]
    command = shlex.join(["python", "-m", "benchmarks.plans", "measure", *paths, "--shapes", *shapes])
    run = lambda result: {key: result[key] for key in ("command", "commit")}
    runs = [each for result in results for each in result.get("runs", [run(result)])]
    whole = results[-1] | {"device": f"{gpus_of(shapes)} {kind(results[0])}", "versions": versions, "command": command}
    return whole | {"runs": runs, "shapes": shapes, "summary": summary(shapes)}


def summary(shapes: dict[str, Any]) -> dict[str, Any]:
    """Return the measures of all shapes and budgets together."""
    every = [of for shape in shapes.values() for of in shape["budgets"].values()]
    column = lambda name: sorted(of[name] for of in every if of.get(name))
    errors = lambda name: [abs(ratio - 1) for ratio in column(name)]
    of = lambda errors: [round(statistics.median(errors), 4), round(max(errors), 4)] if errors else None
    if not (best := column("plan / best")):
        return {"plans": len(every), "ran": 0}
    return {
        "plans": len(every),
        "ran": sum(of["runs"] for of in every),
        "plan / best, at most": best[-1],
        "plan / best <= 1.01, share": round(sum(ratio <= 1.01 for ratio in best) / len(best), 3),
        "error of the time: median, most": of(errors("predicted / measured ms")),
        "error of the memory: median, most": of(errors("predicted / planned by XLA")),
        "error of XLA's plan: median, most": of(errors("planned by XLA / peak")),
    }


if __name__ == "__main__":
    main()
