"""The same residuals saved, recomputed and offloaded, with plain JAX and with ours, side by side: `dense` and `moe`.

A step is the forward and backward pass of a stack of the reference model's layers, bf16 on float32 weights, and SGD in
place. All modes are timed in one process, in turn, so that they share the machine's state; each peer that has options
of its own is timed under all of them, and the fastest counts. Then each mode runs in a process of its own for its peak
memory. The parent never touches the GPU.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import streams
from benchmarks.cases import MODES, Case, modes_of
from benchmarks.ratios import ratios
from benchmarks.steps import compile_step, import_te, initial, model_flops
from models.metrics import PEAK_FLOPS


def main(case: Case) -> dict[str, Any] | None:
    """The results, also written to `--out`; None in a worker."""
    options = parse(case)
    if options.worker:
        for found in WORKERS[options.worker](case, options):
            print(json.dumps(found), flush=True)
        return None
    with tempfile.TemporaryDirectory() as cache:  # compiled once, by the timing process
        for timed in worker(case, options, "times", cache):
            write(case, timed, options)
        for mode in (mode for mode in options.fresh if mode in timed["modes"]):
            for peak in worker(case, options, "peak", cache, mode, timed["modes"][mode]["options"]):
                timed["modes"][mode] |= peak
            write(case, timed, options)
    return timed


def write(case: Case, timed: dict[str, Any], options: argparse.Namespace) -> None:
    """What there is so far, with its ratios: what fails, or is stopped, later takes nothing with it."""
    timed["ratios"] = ratios(case, timed["modes"], options)
    options.out.write_text(json.dumps(timed, indent=1) + "\n")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Of the layers' shape, and of what else the benchmarks of a step share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--d_model", type=int, default=4096)
    parser.add_argument("--kv_heads", type=int, default=8)
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs that share batch and weights")
    parser.add_argument("--expert", type=int, default=1, help="GPUs that share the batch and have experts of their own")
    parser.add_argument("--attention", default="cudnn", choices=("cudnn", "te", "xla"))
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed, a turn")
    parser.add_argument("--commit", default=head(), help="recorded beside the numbers")
    return parser


def parse(case: Case) -> argparse.Namespace:
    parser = arguments(case.description)
    parser.set_defaults(out=Path(f"benchmarks/results/{case.program}.json"))
    case.arguments(parser)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--best", nargs="+", choices=case.best, default=list(case.best), help="candidates for ours_best"
    )
    parser.add_argument("--fresh", nargs="*", choices=MODES, default=list(MODES), help="also in a process of their own")
    parser.add_argument("--rounds", type=int, default=4, help="times each mode's turn comes")
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


def worker(
    case: Case, options: argparse.Namespace, what: str, cache: str, mode: str = "", variant: str = ""
) -> Iterator[dict[str, Any]]:
    """What a fresh process of this program measures, so far each time."""
    say(f"{what} {mode}")
    command = [sys.executable, "-m", f"benchmarks.{case.program}", *sys.argv[1:], "--worker", what]
    command += ["--mode", mode, "--variant", variant] if mode else []
    # 64 layers' weights and gradients take more than the three quarters of a device that JAX takes by default.
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", **os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        yield from (json.loads(line) for line in process.stdout or () if line.startswith("{"))
    if process.returncode:
        sys.exit(f"benchmarks.{case.program}: {what} {mode} failed with exit status {process.returncode}")


def say(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ in a worker


Key = tuple[str, str]  # of a mode and a variant of it


def times(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Step times of all modes under all their options, the fastest options' kept; after each round."""
    import_te(options)
    import jax

    chosen = {mode: variants for mode, variants in modes_of(case).items() if mode in options.modes}
    if "ours_best" in chosen:
        chosen["ours_best"] = {name: case.best[name] for name in options.best}
    state = initial(case, options)
    steps, facts = compile_all(case, options, chosen)

    def turn(key: Key) -> list[float]:
        nonlocal state
        state, spent = jax.block_until_ready(steps[key](*state)), []
        for _ in range(options.steps):
            begin = time.perf_counter()
            state = jax.block_until_ready(steps[key](*state))
            spent.append(1e3 * (time.perf_counter() - begin))
        return spent

    # The first turn warms up (pinned memory, clocks), and what is far behind there is out. Others replace its times.
    spent = {}
    for key in steps:
        spent[key] = turn(key)
        say(f"{', '.join(key)}: {statistics.median(spent[key]):.1f} ms")
    near = contenders(spent, facts)
    for mode in chosen.keys() - {mode for mode, _ in near}:
        needs = {"remat": least(facts, "remat"), mode: least(facts, mode)}
        say(f"{mode} is left out: no candidate needs as little memory as remat, GiB: {needs}")
    devices = options.fsdp * options.expert
    known = provenance(case.program, options.commit, devices)
    known["shape"] = {**case.shape(options), "residuals": list(case.names)}
    flops = model_flops(case, options) / devices
    yield {**known, "rounds": 0, "modes": fastest(spent, near, facts, flops)}
    for number in range(options.rounds):
        for key in near:
            spent[key] = (spent[key] if number else []) + turn(key)
        yield {**known, "rounds": 1 + number, "modes": fastest(spent, near, facts, flops)}


def compile_all(case: Case, options: argparse.Namespace, chosen: dict[str, Any]) -> tuple[dict[Key, Any], Any]:
    """The steps, and what is known of each before it runs."""
    steps, facts = {}, {}
    for key, variant in (((mode, name), v) for mode, variants in chosen.items() for name, v in variants.items()):
        steps[key], host, seconds = compile_step(case, options, variant)
        memory = steps[key].memory_analysis()
        facts[key] = {
            "options": key[1],
            "compile_s": round(seconds, 2),
            "temp_gib": round(memory.temp_size_in_bytes / 2**30, 4),
            "host_temp_gib": round(memory.host_temp_size_in_bytes / 2**30, 4),
            "residuals_host_gib": round(host / 2**30, 4),
        }
        say(f"compiled {', '.join(key)}")
    return steps, facts


def contenders(spent: dict[Key, list[float]], facts: dict[Key, dict[str, Any]]) -> list[Key]:
    """Those within 3 % of their mode's fastest; of ours_best only what needs no more memory than remat."""
    room = least(facts, "remat")
    fits = [key for key in spent if key[0] != "ours_best" or facts[key]["temp_gib"] <= room]
    ms = {key: statistics.median(spent[key]) for key in fits}
    return [key for key in fits if ms[key] < 1.03 * min(ms[other] for other in fits if other[0] == key[0])]


def least(facts: dict[Key, dict[str, Any]], mode: str) -> float:
    """GiB of temporary memory that a mode needs under the options that need the least."""
    return min((facts[key]["temp_gib"] for key in facts if key[0] == mode), default=0.0)


def fastest(spent: dict[Key, list[float]], near: list[Key], facts: Any, flops: float) -> dict[str, dict[str, Any]]:
    """Mode -> its fastest variant, with the times of the others beside it."""
    ms = {key: round(statistics.median(times), 2) for key, times in spent.items()}
    modes = {}
    for mode in dict.fromkeys(mode for mode, _ in near):
        best = min((key for key in near if key[0] == mode), key=ms.__getitem__)
        others = [key for key in spent if key[0] == mode and key != best]
        modes[mode] = {
            "step_ms": ms[best],
            "spread_ms": [round(min(spent[best]), 2), round(max(spent[best]), 2)],
            "mfu": round(flops / ms[best] / 1e-3 / PEAK_FLOPS["NVIDIA H200"], 4),
            **facts[best],
            "other_options": {
                name: {"step_ms": ms[mode, name], "temp_gib": facts[mode, name]["temp_gib"]} for _, name in others
            },
        }
    return modes


def peak(case: Case, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The peak of allocated device memory over three steps, in a process that did nothing else; then a profile."""
    import_te(options)
    import jax

    step, _, _ = compile_step(case, options, modes_of(case)[options.mode][options.variant])
    state = initial(case, options)
    for _ in range(3):
        state = step(*state)
    jax.block_until_ready(state)
    measured = {"peak_gib": round((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30, 4)}
    if not options.mode.startswith("ours"):
        yield measured
        return
    gpus = streams.traced(lambda: jax.block_until_ready(step(*state)))
    yield measured | ({"profile": streams.summary(next(iter(gpus.values())))} if gpus else {})  # of one of them


WORKERS = {"times": times, "peak": peak}


def provenance(program: str, commit: str, devices: int = 1) -> dict[str, Any]:
    """Device, versions, command and commit."""
    import jax

    return {
        "device": f"{devices} {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": versions(),
        "command": shlex.join(
            ["python", "-m", f"benchmarks.{program}", *itertools.takewhile("--worker".__ne__, sys.argv[1:])]
        ),
        "commit": commit,
    }
