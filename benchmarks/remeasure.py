"""Rerun the commands that the result files name; each rewrites its file.

    python -m benchmarks.remeasure [--list] [--only dense verify-moe] [--part 1/4] [--gpus 2]

A text file holds a header and what its command prints. The exit status is 1 if a command fails.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import bench

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "results").glob("*.[jt]*"))}


def recorded(path: Path) -> tuple[str, int]:
    """Return a result file's command, without `--commit`, and the number of GPUs."""
    text = path.read_text()
    if path.suffix == ".json":
        facts = json.loads(text)
    else:
        facts = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines())
    return re.sub(r" --commit \S+", "", facts["command"]), int(facts["device"].split()[0])


def measure(path: Path, command: str, gpus: int) -> int:
    """Run a command, and return its exit status. No process that it started outlives it and occupies the GPU."""
    with path.open("w") if path.suffix == ".txt" else contextlib.nullcontext() as out:
        if out:
            name = subprocess.check_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], text=True)
            versions = ", ".join(map(" ".join, bench.versions().items()))
            out.write(f"device: {gpus} {name.splitlines()[0]} (gpu)\nversions: {versions}\ncommit: {bench.head()}\n")
            print(f"command: {command}\n", file=out, flush=True)
        words = [sys.executable, *shlex.split(command)[1:]]
        process = subprocess.Popen(words, stdout=out, start_new_session=True)
        try:
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    parser.add_argument("--only", nargs="+", choices=FILES, default=list(FILES), metavar="NAME")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th command, from the K-th on")
    parser.add_argument("--gpus", type=int, default=1, help="only commands that ran on this many GPUs")
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    commands = {name: recorded(FILES[name]) for name in options.only}
    failed = False
    for name in [name for name in commands if commands[name][1] == options.gpus][first - 1 :: step]:
        print(f"{name}: {commands[name][0]}", flush=True)
        if not options.list:
            failed |= measure(FILES[name], *commands[name]) != 0
    return int(failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that measure() ends what it started
    sys.exit(main())
