"""Plans against measured policies: step time and memory, predicted and measured, at three budgets for each shape.

    python -m benchmarks.plans predict --machine machines/h200.json [--out benchmarks/predicted/plans.json]
    python -m benchmarks.plans measure [--predicted FILE] [--shapes NAME ...] [--near FILE ...] [--out FILE]

The first needs no GPU; its file is committed before the second runs. That plans for three budgets for each shape: 2 %
more than recomputing everything takes by XLA's plan, what the largest step takes, and the middle. It measures these
plans beside hand-made and random policies, or those that are fast in the results `--near`.
"""

import argparse
import dataclasses
import json
import random
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
from jaxoffload.proof import Machine, Prediction, predict

Keep = Callable[[dict[str, Any]], None]


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
    parser = bench.parser(__doc__, "plans", steps=1, shapes=[*SHAPES], near=[], **paths)
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
    for name in options.shapes:
        found = before["shapes"].get(name, {}).get("policies", {})

        def keep(of: dict[str, Any], name: str = name) -> None:
            result["shapes"][name] = of
            bench.write(options, result)  # so that a later failure loses nothing

        if predicts:
            keep({"policies": predictions(SHAPES[name], machine)})
        else:
            measure(name, found, machine, options, keep)


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
        how = {"offload_layers": dice.choice(["all", 0.25, 0.5, 0.75])}
        made[f"drawn {seed}"] = Policy(residuals, **how, other_layers=dice.choice(["save", "recompute"]))
    return made


def predictions(shape: Shape, machine: Machine) -> dict[str, dict[str, float]]:
    """Return what is predicted for each policy that runs beside plans, in OVERLAP's order of copies."""
    options, args = options_of(shape, {}), arguments(shape, options_of(shape, {}))
    of = lambda variant: predict(step_of(shape, options, variant), *args, machine=machine)
    return {key: facts_of(of(v)) for key, v in policies_of(shape.case).items() if v.options == OVERLAP}


def facts_of(found: Prediction) -> dict[str, float]:
    return {"predicted_ms": round(found.step_ms, 2), "predicted_gib": round(found.memory.total / GIB, 4)}


def planned(step: Callable[..., Any], args: Any, gib: float, machine: Machine) -> dict[str, Any]:
    """Return the plan for a budget, and what is predicted for it."""
    begin = time.perf_counter()
    plan = jaxoffload.plan(jax.jit(step, donate_argnums=0), *args, budget=round(gib * GIB), machine=machine)
    seconds = round(time.perf_counter() - begin, 1)
    return facts_of(plan.prediction) | {"seconds": seconds, "policy": dataclasses.asdict(plan.policy)}


def near(name: str, files: list[str], known: dict[str, Variant]) -> dict[str, Variant]:
    """Return the policies that took at most 1 % longer than the fastest in their memory, in any of these results."""
    found = {key: known[key] for key in ("recompute", "save")}
    for file in files:
        every = json.loads(Path(file).read_text())["shapes"].get(name, {"policies": {}})["policies"]
        ran = {key: of for key, of in every.items() if "step_ms" in of}
        fastest = lambda most: min(of["step_ms"] for of in ran.values() if of["device_gib"] <= most)
        for key, of in ran.items():
            if of["step_ms"] <= 1.01 * fastest(of["device_gib"]):
                policy = variant_of(Policy(**of["policy"])) if "policy" in of else known[key]
                found[f"{Path(file).stem}, {key}" if "policy" in of else key] = policy
    return found


def measure(name: str, found: dict[str, Any], machine: Machine, options: argparse.Namespace, keep: Keep) -> None:
    """Measure step time and memory of the plans and of other policies of a shape; `keep` what is known of them."""
    shape, sizes = SHAPES[name], options_of(SHAPES[name], {})
    variants = policies_of(shape.case)
    variants = near(name, options.near, variants) if options.near else variants
    group = lambda variants: cases.group_of(shape.case, sizes, variants, microbatches=shape.microbatches)
    made = group({("", key): variant for key, variant in variants.items()})
    lines = {key: step.facts for (_, key), step in made.steps.items()}
    for key, facts in lines.items():
        facts.update(found.get(key, {}))
    budgets = budgets_of(lines["recompute"]["all_gib"], max(of.get("all_gib", 0) for of in lines.values()))
    of = lambda gib: planned(step_of(shape, sizes, ours({})), arguments(shape, sizes), gib, machine)
    plans = {which: of(gib) for which, gib in budgets.items()}  # one by one, as each tells its seconds
    steps = group({("plan", which): variant_of(Policy(**of["policy"])) for which, of in plans.items()}).steps
    for (_, which), step in steps.items():
        step.facts.update(plans[which])
        lines[f"plan {which}"] = step.facts

    def then() -> None:
        renamed = {"all_gib": "device_gib"}
        known = {key: {renamed.get(what, what): x for what, x in facts.items()} for key, facts in lines.items()}
        judgments = {which: judged(gib, known.get(f"plan {which}", {}), known) for which, gib in budgets.items()}
        keep({"budgets": judgments, "policies": known})

    bench.measure(made._replace(steps=made.steps | steps), options, then)


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
