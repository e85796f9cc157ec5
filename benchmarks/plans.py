"""Plans against measured policies: step time and memory, predicted and measured, at three budgets for each shape.

    python -m benchmarks.plans predict --machine machines/h200.json [--out benchmarks/predicted/plans.json]
    python -m benchmarks.plans measure [--predicted FILE] [--shapes NAME ...] [--add] [--out FILE]

The first needs no GPU. It writes down what is predicted for the hand-made policies of the other benchmarks and for
random ones; its file is committed before the second runs. The second has three budgets for each shape: 2 % more than
recomputing everything takes by XLA's plan, what the largest step takes, and the middle. It plans for each, and measures
these plans and all other policies. A policy fits in a budget by XLA's plan. With `--add` the file keeps the shapes that
it has, those of an earlier run.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

import jaxoffload
from benchmarks import bench, cases, dense, moe
from benchmarks.bench import GIB, Variant
from benchmarks.cases import OVERLAP, Case, ours
from jaxoffload import Policy
from jaxoffload.proof import Machine, NothingFits


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


def parse() -> argparse.Namespace:
    paths = {"predicted": "benchmarks/predicted/plans.json", "machine": "machines/h200.json"}
    parser = bench.parser(__doc__, "plans", steps=1, shapes=[*SHAPES], add=False, **paths)
    parser.add_argument("what", choices=("predict", "measure"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    sizes, predicts = [SHAPES[name].sizes for name in options.shapes], options.what == "predict"
    devices = max(of.get("fsdp", 1) for of in sizes)
    if predicts:
        jax.config.update("jax_num_cpu_devices", devices)
        before = {"machine": json.loads(Path(options.machine).read_text()), "shapes": {}}
    else:
        bench.prepare(*(of.get("attention", "") for of in sizes))
        before = json.loads(Path(options.predicted).read_text())
    machine = Machine.from_json(json.dumps(before["machine"]))
    result = bench.provenance("plans", options, devices)
    result |= {"predicted": options.predicted, "machine": before["machine"], "shapes": {}}
    result = added(json.loads(options.out.read_text()), result) if options.add else result
    for name in options.shapes:
        shape, found = SHAPES[name], before["shapes"].get(name, {}).get("policies", {})
        of = {"policies": predictions(shape, machine)} if predicts else measured(shape, found, machine, options)
        result["shapes"][name] = of
        bench.write(options, result)  # so that a later failure loses nothing


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the result of this run, to which that of an earlier one is added."""
    kind = lambda of: (of["device"].partition(" ")[2], of["versions"], of["machine"])
    if kind(old) != kind(new):
        sys.exit("--add: the device, the versions or the machine are not those of the file")
    run = lambda of: {"command": of["command"], "commit": of["commit"]}
    return new | {"runs": [*old.get("runs", [run(old)]), run(new)], "shapes": old["shapes"]}


def options_of(shape: Shape, sizes: dict[str, Any]) -> argparse.Namespace:
    """Return the options of the case's own benchmark. Without a GPU kernels are traced as the report traces them."""
    options = argparse.Namespace(**cases.SIZES | shape.sizes | sizes)
    if jax.default_backend() != "gpu":
        options.attention = "cudnn" if options.attention == "te" else options.attention
        options.grouped = "ragged"
    return options


def step_of(shape: Shape, options: argparse.Namespace, variant: Variant) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a step, (weights, x) -> (weights, x), with a leading axis of microbatches if there are several."""
    return cases.step_of(shape.case, options, variant, shape.microbatches)


def arguments(shape: Shape, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the abstract arguments of a step, with shardings."""
    return cases.state_of(shape.case, options, shape.microbatches)[0]


def variant_of(policy: Policy) -> Variant:
    fields = dataclasses.asdict(policy)
    return ours(fields.pop("residuals"), **fields)


def policies_of(case: Case) -> dict[str, Variant]:
    """Return the policies that run beside plans."""
    every = {"recompute": ours({})} | case.best | {"save": ours(dict.fromkeys(case.all_names, "save"))}
    return every | {key: variant_of(policy) for key, policy in drawn(case, 20).items()}


def drawn(case: Case, count: int) -> dict[str, Policy]:
    """Return policies drawn at random, always the same ones: a decision for each name, and how many layers offload."""
    made = {}
    for seed in range(count):
        dice = random.Random(seed)
        residuals = {name: dice.choice(["save", "offload", "recompute"]) for name in case.all_names}
        layers = dice.choice(["all", 0.25, 0.5, 0.75])
        others = dice.choice(["save", "recompute"])
        made[f"drawn {seed}"] = Policy(residuals, offload_layers=layers, other_layers=others)
    return made


def predictions(shape: Shape, machine: Machine) -> dict[str, dict[str, float]]:
    """Return what is predicted for each policy whose layers are all alike."""
    options, found = options_of(shape, {}), {}
    for key, variant in policies_of(shape.case).items():
        fields = dict(variant.fields)
        if variant.options == OVERLAP and fields.get("offload_layers", "all") == "all":
            policy = Policy({"*": "recompute"} | variant.residuals, **fields)
            found[key] = predicted(step_of(shape, options, variant), arguments(shape, options), policy, machine)
    return found


def predicted(step: Callable[..., Any], args: Any, policy: Policy, machine: Machine) -> dict[str, float]:
    """Return the time and the memory that are predicted for a step under a policy."""
    most = {"budget": "100TiB", "host_budget": "100TiB"}
    least, *_ = jaxoffload.plan(step, *args, **most, machine=machine, fixed=policy).curve  # all layers offload
    return {"predicted_ms": round(least.ms, 2), "predicted_gib": round(least.bytes / GIB, 4)}


def planned(step: Callable[..., Any], args: Any, gib: float, machine: Machine) -> dict[str, Any]:
    """Return the plan for a budget, and what is predicted for it. On a GPU XLA compiles candidates."""
    begin, compile = time.perf_counter(), jax.default_backend() == "gpu"
    plan = jaxoffload.plan(step, *args, budget=round(gib * GIB), machine=machine, compile=compile)
    sizes = {"predicted_ms": round(plan.step_ms, 2), "predicted_gib": round(plan.memory.total / GIB, 4)}
    return sizes | {"seconds": round(time.perf_counter() - begin, 1), "policy": dataclasses.asdict(plan.policy)}


def measured(shape: Shape, found: dict[str, Any], machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """Return step time and memory of the plans and of all other policies of a shape."""
    sizes = options_of(shape, {})
    group = lambda variants: cases.group_of(shape.case, sizes, variants, microbatches=shape.microbatches)
    made = group({("", name): variant for name, variant in policies_of(shape.case).items()})
    lines = {name: step.facts for (_, name), step in made.steps.items()}
    for name, facts in lines.items():
        facts.update(found.get(name, {}))
    budgets = budgets_of(lines["recompute"]["all_gib"], max(of.get("all_gib", 0) for of in lines.values()))
    plans = {}
    for which, gib in budgets.items():
        with contextlib.suppress(NothingFits):
            plans[which] = planned(step_of(shape, sizes, ours({})), arguments(shape, sizes), gib, machine)
    steps = group({("plan", which): variant_of(Policy(**of["policy"])) for which, of in plans.items()}).steps
    for (_, which), step in steps.items():
        step.facts.update(plans[which])
        lines[f"plan {which}"] = step.facts
    bench.measure(made._replace(steps=made.steps | steps), options)
    for facts in lines.values():
        facts["device_gib"] = facts.get("all_gib")
    judgments = {which: judged(gib, lines.get(f"plan {which}", {}), lines) for which, gib in budgets.items()}
    return {"budgets": judgments, "policies": lines}


def budgets_of(least: float, most: float) -> dict[str, float]:
    """Return three budgets in GiB, from what recomputing everything and the largest step take."""
    least = round(1.02 * least, 4)
    return {"least": least, "middle": round((least + max(most, least)) / 2, 4), "all": round(max(most, least), 4)}


def judged(budget: float, plan: dict[str, Any], lines: dict[str, Any]) -> dict[str, Any]:
    """Return the plan for a budget in GiB beside the fastest of all policies that fit in it."""
    ms = {name: of["step_ms"] for name, of in lines.items() if "step_ms" in of and of["device_gib"] <= budget}
    best = min(ms, key=ms.__getitem__, default=None)
    result = {"budget_gib": budget, "best": best, "runs": "step_ms" in plan}
    return result | ({"plan / best": round(plan["step_ms"] / ms[best], 4)} if best and result["runs"] else {})


if __name__ == "__main__":
    main()
