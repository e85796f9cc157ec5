"""What `dense` and `moe` share: the same residuals saved, recomputed and offloaded, by plain JAX and by ours.

A step is the forward and backward pass of a stack of the example model's layers, in bf16 on float32 weights, and an
SGD update in place. One process times all modes alternately, so that they share the machine's state. A mode with
several variants is timed with each, and the fastest counts. Then each mode runs in a fresh process, which measures its
peak memory. The parent process never uses the GPU.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import streams
from benchmarks.cases import MODES, Case, Variant, modes_of
from benchmarks.ratios import ratios
from benchmarks.steps import NO_PLAN, compile_step, import_te, initial, mfu, model_flops, planned_gib


def main(case: Case) -> dict[str, Any] | None:
    """Measure, write the results to `--out` and return them; None in a worker process."""
    options = parse(case)
    if options.worker:
        for found in WORKERS[options.worker](case, options):
            print(json.dumps(found), flush=True)
        return None
    with tempfile.TemporaryDirectory() as cache:  # the timing process compiles for the others too
        for result in worker(case, options, cache, "times"):
            write(case, result, options)
        for mode in (mode for mode in options.fresh if mode in result["modes"]):
            variant = result["modes"][mode]["options"]
            for measured in worker(case, options, cache, "peak", "--mode", mode, "--variant", variant):
                result["modes"][mode] |= measured
            write(case, result, options)
    return result


def write(case: Case, result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write what has been measured so far, with its ratios, so that a later failure loses nothing."""
    result["ratios"] = ratios(case, result["modes"], options)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all benchmarks of a step share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--head_dim", type=int, default=128)
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs that split batch and weights")
    parser.add_argument("--expert", type=int, default=1, help="GPUs that split batch and experts")
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "te", "xla"))
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round")
    parser.add_argument("--commit", default=head(), help="the commit to record")
    return parser


def parse(case: Case) -> argparse.Namespace:
    parser = arguments(case.description)
    parser.set_defaults(out=Path(f"benchmarks/results/{case.program}.json"))
    case.arguments(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    names = list(case.best)
    parser.add_argument("--best", nargs="+", choices=names, default=names, help="candidates for ours_best")
    parser.add_argument("--fresh", nargs="*", choices=MODES, default=list(MODES), help="modes to measure peaks of")
    parser.add_argument("--rounds", type=int, default=4, help="rounds in which every mode is timed")
    parser.add_argument("--worker", choices=("times", "peak"), help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.fresh = [mode for mode in options.fresh if mode in options.modes]
    if "ours_best" in options.modes and "remat" not in options.modes:
        parser.error("--modes: ours_best is the best at no more memory than remat; add remat")
    return options


def versions() -> dict[str, str]:
    kept = {"jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas"}
    kept |= {"transformer_engine"}
    return dict(sorted((p.name, p.version) for p in importlib.metadata.distributions() if p.name in kept))


def head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def worker(case: Case, options: argparse.Namespace, cache: str, *what: str) -> Iterator[dict[str, Any]]:
    """Yield what a fresh process of this program prints: each time all that it has measured so far."""
    say(" ".join(what))
    command = [sys.executable, "-m", f"benchmarks.{case.program}", *sys.argv[1:], "--worker", *what]
    # The weights and gradients of 64 layers need more than the 75 % of the device that JAX takes by default.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", **os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield from (json.loads(line) for line in process.stdout or () if line.startswith("{"))
    if process.returncode:
        sys.exit(f"benchmarks.{case.program}: {' '.join(what)} failed with exit status {process.returncode}")


def markdown(*rows: Sequence[str]) -> str:
    """Return a Markdown table, whose first row is its head."""
    head, *others = ("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"


def say(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ worker processes


Key = tuple[str, str]  # a mode, and the name of one of its variants


def times(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield, after each round, the step times of all modes."""
    import_te(options)
    state = initial(case, options)
    steps, facts = compile_all(case, options)

    def measure(key: Key) -> list[float]:
        nonlocal state
        state, ms = jax.block_until_ready(steps[key](*state)), []
        for _ in range(options.steps):
            begin = time.perf_counter()
            state = jax.block_until_ready(steps[key](*state))
            ms.append(1e3 * (time.perf_counter() - begin))
        return ms

    # The warm-up round fills the pinned pool, raises the clocks and drops slow variants. The others replace its times.
    spent = {}
    for key in steps:
        spent[key] = measure(key)
        say(f"{', '.join(key)}: {statistics.median(spent[key]):.1f} ms")
    near = contenders(spent, facts)
    say_dropped(near, facts)
    devices = options.fsdp * options.expert
    known = provenance(case.program, options.commit, devices)
    known["shape"] = {**case.shape(options), "residuals": list(case.names)}
    flops = model_flops(case, options) / devices
    yield {**known, "rounds": 0, "modes": fastest(spent, near, facts, flops)}
    for number in range(options.rounds):
        for key in near:
            spent[key] = (spent[key] if number else []) + measure(key)
        yield {**known, "rounds": 1 + number, "modes": fastest(spent, near, facts, flops)}


def chosen(case: Case, options: argparse.Namespace) -> dict[Key, Variant]:
    """Return the variants that the options ask for."""
    modes = {mode: variants for mode, variants in modes_of(case).items() if mode in options.modes}
    if "ours_best" in modes:
        modes["ours_best"] = {name: case.best[name] for name in options.best}
    return {(mode, name): variant for mode, variants in modes.items() for name, variant in variants.items()}


def compile_all(case: Case, options: argparse.Namespace) -> tuple[dict[Key, Any], dict[Key, dict[str, Any]]]:
    """Return the compiled steps, and what is known about each before it runs."""
    steps, facts = {}, {}
    for key, variant in chosen(case, options).items():
        step, host, seconds = compile_step(case, options, variant)
        if (planned := planned_gib(step)) is None:
            say(f"{', '.join(key)}: left out; {NO_PLAN}")
            continue
        steps[key] = step
        facts[key] = {
            "options": key[1],
            "compile_s": round(seconds, 2),
            "temp_gib": planned["temp_gib"],
            "host_temp_gib": planned["host_temp_gib"],
            "residuals_host_gib": round(host / 2**30, 4),
        }
        say(f"compiled {', '.join(key)}")
    return steps, facts


def contenders(spent: dict[Key, list[float]], facts: dict[Key, dict[str, Any]]) -> list[Key]:
    """Return the variants within 3 % of their mode's fastest; for ours_best only those that need no more memory than
    remat."""
    limit = least_gib(facts, "remat")
    fits = [key for key in spent if key[0] != "ours_best" or facts[key]["temp_gib"] <= limit]
    ms = {key: statistics.median(spent[key]) for key in fits}
    return [key for key in fits if ms[key] < 1.03 * min(ms[other] for other in fits if other[0] == key[0])]


def say_dropped(near: list[Key], facts: dict[Key, dict[str, Any]]) -> None:
    for mode in {mode for mode, _ in facts} - {mode for mode, _ in near}:
        gib = {each: least_gib(facts, each) for each in ("remat", mode)}
        say(f"{mode} is dropped, because every candidate needs more memory than remat (GiB): {gib}")


def least_gib(facts: dict[Key, dict[str, Any]], mode: str) -> float:
    """Return the temporary memory of the mode's variant that needs the least."""
    return min((facts[key]["temp_gib"] for key in facts if key[0] == mode), default=0.0)


def fastest(spent: dict[Key, list[float]], near: list[Key], facts: Any, flops: float) -> dict[str, dict[str, Any]]:
    """Return mode -> the results of its fastest variant, with the times of the others."""
    ms = {key: round(statistics.median(times), 2) for key, times in spent.items()}
    modes = {}
    for mode in dict.fromkeys(mode for mode, _ in near):
        best = min((key for key in near if key[0] == mode), key=ms.__getitem__)
        others = [key for key in spent if key[0] == mode and key != best]
        modes[mode] = {
            "step_ms": ms[best],
            "spread_ms": [round(min(spent[best]), 2), round(max(spent[best]), 2)],
            "mfu": mfu(flops, ms[best]),
            **facts[best],
            "other_options": {
                name: {"step_ms": ms[mode, name], "temp_gib": facts[mode, name]["temp_gib"]} for _, name in others
            },
        }
    return modes


def peak(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the peak of allocated device memory over three steps of a fresh process, and, for ours, a profile."""
    import_te(options)
    step, _, _ = compile_step(case, options, modes_of(case)[options.mode][options.variant])
    state = initial(case, options)
    for _ in range(3):
        state = step(*state)
    jax.block_until_ready(state)
    measured: dict[str, Any] = {"peak_gib": peak_gib()}
    if options.mode.startswith("ours"):
        gpus = streams.traced(lambda: jax.block_until_ready(step(*state)))
        for events in [*gpus.values()][:1]:  # all GPUs do the same
            measured["profile"] = streams.summary(events)
    yield measured


def peak_gib() -> float:
    """Return the most that was allocated on a device at once so far, or 0 if it does not say."""
    return round((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30, 4)


WORKERS = {"times": times, "peak": peak}


def provenance(program: str, commit: str, devices: int = 1) -> dict[str, Any]:
    """Return what every result file begins with: device, versions, command and commit."""
    arguments = itertools.takewhile("--worker".__ne__, sys.argv[1:])
    return {
        "device": f"{devices} {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": versions(),
        "command": shlex.join(["python", "-m", f"benchmarks.{program}", *arguments]),
        "commit": commit,
    }
