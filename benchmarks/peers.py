"""The same residuals saved, recomputed and offloaded, with plain JAX and with ours, side by side: `dense` and `moe`.

A step is the forward and backward pass of a stack of the reference model's layers, bf16 on float32 weights, and SGD in
place. All modes are timed in one process, in turn, so that they share the machine's state; each peer that has options
of its own is timed under all of them, and the fastest counts. Then each mode runs in a process of its own for its peak
memory. The parent never touches the GPU.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
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
        print(json.dumps(WORKERS[options.worker](case, options)))
        return None
    with tempfile.TemporaryDirectory() as cache:  # compiled once, by the timing process
        timed = worker(case, options, "times", cache)
        write(case, timed, options)
        for mode in (mode for mode in options.fresh if mode in timed["modes"]):
            timed["modes"][mode] |= worker(case, options, "peak", cache, mode, timed["modes"][mode]["options"])
            write(case, timed, options)
    return timed


def write(case: Case, timed: dict[str, Any], options: argparse.Namespace) -> None:
    """What there is so far, with its ratios: a process that fails later takes nothing with it."""
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


def head() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def worker(
    case: Case, options: argparse.Namespace, what: str, cache: str, mode: str = "", variant: str = ""
) -> dict[str, Any]:
    """What a fresh process of this program measures."""
    say(f"{what} {mode}")
    command = [sys.executable, "-m", f"benchmarks.{case.program}", *sys.argv[1:], "--worker", what]
    command += ["--mode", mode, "--variant", variant] if mode else []
    done = subprocess.run(command, env=os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"benchmarks.{case.program}: {what} {mode} failed with exit status {done.returncode}")
    return json.loads(done.stdout.decode().splitlines()[-1])


def say(what: str) -> None:
    print(f"{time.strftime('%X')} {what}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------ in a worker


def times(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Step times of all modes under all their options, the fastest options' kept."""
    import_te(options)
    import jax

    compiled, facts = {}, {}
    state = initial(case, options)
    chosen = {mode: variants for mode, variants in modes_of(case).items() if mode in options.modes}
    if "ours_best" in chosen:
        chosen["ours_best"] = {name: case.best[name] for name in options.best}
    for mode, variants in chosen.items():
        for name, variant in variants.items():
            compiled[mode, name], host, seconds = compile_step(case, options, variant)
            memory = compiled[mode, name].memory_analysis()
            facts[mode, name] = {
                "options": name,
                "compile_s": round(seconds, 2),
                "temp_gib": round(memory.temp_size_in_bytes / 2**30, 4),
                "host_temp_gib": round(memory.host_temp_size_in_bytes / 2**30, 4),
                "residuals_host_gib": round(host / 2**30, 4),
            }
            say(f"compiled {mode}, {name}")

    def turn(key: Any) -> list[float]:
        nonlocal state
        state, spent = jax.block_until_ready(compiled[key](*state)), []
        for _ in range(options.steps):
            begin = time.perf_counter()
            state = jax.block_until_ready(compiled[key](*state))
            spent.append(1e3 * (time.perf_counter() - begin))
        return spent

    # The first turn warms up (pinned memory, clocks) and is not counted, but what is far behind there is out.
    first = {}
    for key in compiled:
        first[key] = statistics.median(turn(key))
        say(f"{', '.join(key)}: {first[key]:.1f} ms")
    fits = {mode: list(variants) for mode, variants in chosen.items()}
    if "ours_best" in fits:
        room = min(facts["remat", variant]["temp_gib"] for variant in fits["remat"])
        small = [v for v in fits["ours_best"] if facts["ours_best", v]["temp_gib"] <= room]
        if small:
            fits["ours_best"] = small
        else:
            say(f"ours_best is left out: no candidate needs remat's {room} GiB or less")
            del fits["ours_best"], chosen["ours_best"]
    fastest = {mode: min(first[mode, v] for v in variants) for mode, variants in fits.items()}
    spent = {(mode, v): [] for mode in fits for v in fits[mode] if first[mode, v] < 1.03 * fastest[mode]}
    for _ in range(options.rounds):
        for key in spent:
            spent[key] += turn(key)
    median = {key: round(statistics.median(spent.get(key) or [first[key]]), 2) for key in compiled}
    modes, devices = {}, options.fsdp * options.expert
    for mode, variants in chosen.items():
        best = min((v for m, v in spent if m == mode), key=lambda variant: median[mode, variant])
        step_ms = median[mode, best]
        modes[mode] = {
            "step_ms": step_ms,
            "spread_ms": [round(min(spent[mode, best]), 2), round(max(spent[mode, best]), 2)],
            "mfu": round(model_flops(case, options) / devices / step_ms / 1e-3 / PEAK_FLOPS["NVIDIA H200"], 4),
            **facts[mode, best],
            "other_options": {
                v: {"step_ms": median[mode, v], "temp_gib": facts[mode, v]["temp_gib"]} for v in variants if v != best
            },
        }
    shape = {**case.shape(options), "residuals": list(case.names)}
    return {**provenance(case.program, options.commit, devices), "shape": shape, "modes": modes}


def peak(case: Case, options: argparse.Namespace) -> dict[str, Any]:
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
        return measured
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(*state))
        gpus = streams.read(Path(folder))
    return measured | ({"profile": streams.summary(next(iter(gpus.values())))} if gpus else {})  # of one of them


WORKERS = {"times": times, "peak": peak}


def provenance(program: str, commit: str, devices: int = 1) -> dict[str, Any]:
    """Device, versions, command and commit."""
    import importlib.metadata

    import jax

    kept = {"jax", "jaxlib", "flax", "numpy", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-cublas"}
    kept |= {"transformer_engine"}
    versions = {p.name: p.version for p in importlib.metadata.distributions() if p.name in kept}
    return {
        "device": f"{devices} {jax.devices()[0].device_kind} ({jax.devices()[0].platform})",
        "versions": dict(sorted(versions.items())),
        "command": " ".join([f"python -m benchmarks.{program}", *itertools.takewhile("--worker".__ne__, sys.argv[1:])]),
        "commit": commit,
    }
