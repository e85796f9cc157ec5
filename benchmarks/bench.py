"""What all benchmarks share: their options, steps that are compiled and then timed in turn, ratios, and result files.

A *mode* is what is compared, such as "recompute everything". If it has several *variants*, the fastest counts.
"""

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxoffload.proof import memory_plan, read_profile
from jaxoffload.proof._program.memory import device_bytes
from models import metrics

GIB = 2**30
RESULTS = Path("benchmarks/results")
FORMERLY = {"variants": ["--best"], "profile": ["--fresh"]}  # in commands of result files
Key = tuple[str, str]  # a mode, and the name of one of its variants


class Variant(NamedTuple):
    """One way to run a mode: who runs the layers, the decision per residual, and XLA's options."""

    peer: str
    residuals: dict[str, str]
    options: dict[str, Any]
    fields: tuple[tuple[str, Any], ...] = ()  # further fields of the policy of "ours"


class Step(NamedTuple):
    """A compiled step, (*state) -> state.

    Attributes:
      run: None if it cannot run; then `facts["cannot"]` says why.
      facts: what is known of it. Its times are added.
    """

    run: Callable[..., Any] | None
    facts: dict[str, Any]


class Group(NamedTuple):
    """Steps that are timed in turn; their results are at `path` in the result file.

    Attributes:
      initial: makes their state.
      flops: the model's, of a step, per device.
      microbatches: of a step; `ms` is the time of one.
    """

    path: tuple[str, ...]
    steps: dict[Key, Step]
    initial: Callable[[], Any]
    flops: float | None = None
    microbatches: int = 1


def main(
    program: str,
    options: argparse.Namespace,
    groups: Callable[[argparse.Namespace], Iterable[Group]],
    ratios: Callable[[dict[str, Any], argparse.Namespace], dict[str, float]],
    devices: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """Measure the groups, write the result each time something is known, so that a later failure loses nothing, and
    return it. `more` is written, too."""
    result = provenance(program, options, devices) | more
    for group in groups(options):
        of = result
        for key in group.path:
            of = of.setdefault(key, {})

        def then(group: Group = group, of: dict[str, Any] = of) -> None:
            modes = of.get("modes", {}) | by_mode(group.steps)
            of.update(modes=modes, ratios=ratios(modes, options))
            write(options, result)

        then()  # perhaps nothing can run
        measure(group, options, then)
        print(*group.path, json.dumps(of["ratios"]))
    return result


def parser(description: str | None, program: str, **more: Any) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks have, and of `more`.

    `--steps` are timed in each of `--rounds`, and of the fastest variant of each mode in `--profile` a step is traced.
    The type and the default of an option are those of its value: a list takes several values, False is a switch.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = {"out": RESULTS / f"{program}.json", "steps": 3, "rounds": 4, "profile": [], "commit": head(), **more}
    for name, value in options.items():
        several = {"nargs": "*", "type": type(value[0]) if value else str} if isinstance(value, list) else {}
        how = {"action": "store_true"} if value is False else several or {"type": type(value)}
        made.add_argument(f"--{name}", *FORMERLY.get(name, ()), default=value, **how)
    made.add_argument("--no-profile", dest="profile", action="store_const", const=[])
    return made


def chosen(modes: Mapping[str, Mapping[str, Variant]], options: argparse.Namespace) -> dict[Key, Variant]:
    """Return the variants of `options.modes`; of modes that have some of `options.variants`, only these."""
    names = {name for variants in modes.values() for name in variants}
    for option, known in (("modes", set(modes)), ("variants", names)):
        if unknown := set(getattr(options, option)) - known:
            sys.exit(f"--{option}: {', '.join(sorted(unknown))}: not among {', '.join(sorted(known))}")
    wanted = {mode: [name for name in modes[mode] if name in options.variants] or modes[mode] for mode in options.modes}
    return {(mode, name): modes[mode][name] for mode, names in wanted.items() for name in names}


def prepare(*backends: str) -> None:
    """Set what must be set before JAX's first computation; TransformerEngine wants to be imported before it."""
    # The weights and gradients of many layers need more than the 75 % of the device that JAX takes by default.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    if "te" in backends:
        importlib.import_module("transformer_engine.jax")


def lowered(step: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> jax.stages.Lowered:
    """Trace a step for abstract arguments; it updates the first one in place."""
    where = jax.tree.map(lambda x: x.sharding, args)
    placed = {"in_shardings": where, "out_shardings": where} if jax.tree.leaves(where) else {}
    return jax.jit(step, donate_argnums=0, compiler_options=options, **placed).lower(*args)


def compiled(traced: jax.stages.Lowered, **facts: Any) -> Step:
    """Compile a step. It cannot run if XLA fails, does not say what memory it planned, or planned too much."""
    begin = time.perf_counter()
    try:
        program = traced.compile()
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        return Step(None, facts | {"cannot": str(error)[:300]})
    facts["compile_s"] = round(time.perf_counter() - begin, 2)
    if (planned := planned_gib(program)) is None:
        return Step(None, facts | {"cannot": "XLA does not say what memory it planned"})
    most = (device_bytes() or math.inf) / GIB
    if planned["all_gib"] > most:
        return Step(None, facts | planned | {"cannot": f"the device has {most:.1f} GiB"})
    return Step(program, facts | planned)


def compile_all(traced: Mapping[Key, jax.stages.Lowered]) -> dict[Key, Step]:
    """Return the compiled steps. Threads compile all but the first, by which XLA then knows which kernels are fast."""
    first, *others = traced.values()
    with ThreadPoolExecutor(max_workers=8) as threads:
        return dict(zip(traced, [compiled(first), *threads.map(compiled, others)], strict=True))


def planned_gib(program: jax.stages.Compiled) -> dict[str, float] | None:
    """Return the GiB per device that XLA planned: temporaries, all that a step needs, temporaries on the host, and what
    of its state is there. None where it does not say."""
    return None if (memory := memory_plan(program)) is None else sizes_gib(memory)


def sizes_gib(memory: Any) -> dict[str, float]:
    """Return the GiB of `planned_gib`, of what `memory_analysis` returned."""
    temp, new = memory.temp_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = {
        "temp_gib": temp,
        "all_gib": memory.argument_size_in_bytes + temp + new,
        "host_temp_gib": memory.host_temp_size_in_bytes,
        "host_state_gib": memory.host_argument_size_in_bytes,
    }
    return {name: round(size / GIB, 4) for name, size in sizes.items()}


def measure(group: Group, options: argparse.Namespace, then: Callable[[], None] = lambda: None) -> None:
    """Time steps in turn, so that they share the state of the machine, and add the times to the facts of each.

    In its turn a step runs once, which is not timed, and then `options.steps` times. The first round has all steps. It
    fills the pinned pool, raises the clocks, and shows the `contenders`. These run in `options.rounds` more rounds,
    whose times replace those of the first. `then` is called whenever facts were added.
    """
    steps, spent = group.steps, dict[Key, list[float]]()
    state = jax.block_until_ready(group.initial())

    def run(key: Key) -> float:
        nonlocal state
        given, state = state, None  # it is updated in place
        begin = time.perf_counter()
        state = jax.block_until_ready(steps[key].run(*given))
        return 1e3 * (time.perf_counter() - begin)

    for number in range(1 + options.rounds):
        for key in contenders(steps) if number else [key for key, step in steps.items() if step.run]:
            try:
                times = [run(key) for _ in range(1 + options.steps)][1:]
            except jax.errors.JaxRuntimeError as error:  # NCCL's, say
                steps[key].facts["cannot"] = str(error)[:300]
                state = jax.block_until_ready(group.initial())
                continue
            spent[key] = (spent[key] if number > 1 else []) + times
            steps[key].facts.update(timing(spent[key], group))
            print(time.strftime("%X"), key, steps[key].facts, file=sys.stderr, flush=True)
            then()
    for mode in options.profile if jax.default_backend() == "gpu" else []:
        if (best := fastest(steps, mode)) is not None:
            steps[mode, best].facts["profile"] = profile(lambda key=(mode, best): run(key), steps[mode, best])
            then()


def timing(times: list[float], group: Group) -> dict[str, Any]:
    """Return the median of a step's times in milliseconds, the least and the greatest, and what follows from it."""
    ms = statistics.median(times)
    spread = [round(min(times), 3), round(max(times), 3)]
    found = {"ms": round(ms / group.microbatches, 3), "step_ms": round(ms, 3), "spread_ms": spread}
    if group.flops is not None:
        share = metrics.mfu(1e3 * group.flops / ms, jax.devices()[0].device_kind)
        found["mfu"] = None if share is None else round(share, 4)  # where no peak of this device is known
    return found


def profile(run: Callable[[], Any], step: Step) -> dict[str, float]:
    """Trace a step, and return how many milliseconds it and its copies took, and the copies beside which no kernel ran;
    of several GPUs on the first."""
    run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        found = read_profile(Path(folder), step.run)
    copies = {f"{total.direction}_ms": total.ms for total in found.totals if total.residual == "all"}
    return {"step_ms": found.step_ms, **copies, "exposed_ms": found.exposed_ms, "collectives_ms": found.collective_ms}


def eligible(steps: Mapping[Key, Step]) -> dict[Key, float]:
    """Return the step times of those that ran, except variants of `ours_best` and `one_by_one` that take more memory
    than the least that `remat` does: these modes show what is won without more memory."""
    ran = {key: step.facts for key, step in steps.items() if "step_ms" in step.facts}
    least = min((of["temp_gib"] for (mode, _), of in ran.items() if mode == "remat"), default=math.inf)
    fits = lambda mode, of: mode not in ("ours_best", "one_by_one") or of["temp_gib"] <= least
    return {key: of["step_ms"] for key, of in ran.items() if fits(key[0], of)}


def fastest(steps: Mapping[Key, Step], mode: str) -> str | None:
    """Return the name of a mode's fastest variant."""
    ms = {name: ms for (of, name), ms in eligible(steps).items() if of == mode}
    return min(ms, key=ms.__getitem__, default=None)


def contenders(steps: Mapping[Key, Step]) -> list[Key]:
    """Return the variants within 3 % of the fastest of their mode that takes no more memory."""
    ms = eligible(steps)
    no_larger = lambda a, b: a[0] == b[0] and steps[a].facts["all_gib"] <= steps[b].facts["all_gib"]
    return [key for key in ms if ms[key] < 1.03 * min(ms[other] for other in ms if no_larger(other, key))]


def by_mode(steps: Mapping[Key, Step]) -> dict[str, dict[str, Any]]:
    """Return mode -> the facts of its fastest variant, whose name is `options`, with those of the others."""
    found: dict[str, dict[str, Any]] = {}
    for mode in dict.fromkeys(mode for mode, _ in steps):
        others = {name: step.facts for (of, name), step in steps.items() if of == mode}
        best = fastest(steps, mode)
        found[mode] = ({} if best is None else {"options": best, **others.pop(best)}) | {"other_options": others}
    return found


def ratios(
    modes: Mapping[str, Any], pairs: Iterable[Key], moved: str = "", recomputed: str = "", saved: Sequence[str] = ()
) -> dict[str, float]:
    """Return each pair's ratio of step times and of temporary memory, and what the mode `moved` is worth.

    won_back: the share of recomputation's time that it saves, of what the fastest of `saved` does.
    exposed/step: the share of the step in which copies run beside no kernel.
    """
    ran = {mode: of for mode, of in modes.items() if "step_ms" in of}
    ms = {mode: of["step_ms"] for mode, of in ran.items()}
    found = {}
    for a, b in pairs:
        if {a, b} <= ran.keys():
            found[f"{a}/{b}"] = ms[a] / ms[b]
            if ran[b]["temp_gib"]:  # a CPU may have none
                found[f"{a}/{b} by temp_gib"] = ran[a]["temp_gib"] / ran[b]["temp_gib"]
    if {moved, recomputed} <= ran.keys() and (kept := [ms[mode] for mode in saved if mode in ran]):
        found["won_back"] = (ms[recomputed] - ms[moved]) / (ms[recomputed] - min(kept))
    if profile := ran.get(moved, {}).get("profile"):
        found["exposed/step"] = profile["exposed_ms"] / profile["step_ms"]
    return {name: round(ratio, 4) for name, ratio in found.items()}


def provenance(program: str, options: argparse.Namespace, devices: int = 1) -> dict[str, Any]:
    """Return what every result file begins with: device, versions, command and commit."""
    count = devices * getattr(options, "fsdp", 1) * getattr(options, "expert", 1)
    return {
        "device": f"{count} {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": versions(),
        "command": command_of(program),
        "commit": options.commit,
    }


def command_of(program: str) -> str:
    return shlex.join(["python", "-m", f"benchmarks.{program}", *sys.argv[1:]])


def versions() -> dict[str, str]:
    kept = {"jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas"}
    kept |= {"transformer_engine"}
    return dict(sorted((p.name, p.version) for p in importlib.metadata.distributions() if p.name in kept))


def head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def markdown(*rows: Sequence[str]) -> str:
    """Return a Markdown table, whose first row is its head."""
    head, *others = ("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def cells(facts: dict[str, Any], memory: str = "temp_gib") -> list[str]:
    """Return what a table shows of a step, or of its microbatch: time, memory, and utilisation where it is recorded."""
    shown = [f"{facts.get('ms', facts.get('step_ms')):.0f} ms", f"{facts[memory]:.1f} GiB"]
    if "mfu" in facts:
        shown.append("not known" if facts["mfu"] is None else f"{100 * facts['mfu']:.1f} %")
    return shown
