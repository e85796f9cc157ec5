"""Rerun the commands that the result files name; each rewrites its file.

    python -m benchmarks.remeasure [--list] [--only dense verify-moe] [--part 1/4] [--gpus 2]

A text file holds a header and what its command prints. The exit status is 1 if a command fails. Results whose program
is gone are left: it is in the commit that they name.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from benchmarks import bench

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "results").glob("*.[jt]*"))}
GONE = ("choices", "choices-te", "fits")


def recorded(path: Path) -> tuple[str, int]:
    """Return a result file's command, without `--commit`, and the number of GPUs."""
    text = path.read_text()
    if path.suffix == ".json":
        facts = json.loads(text)
    else:
        facts = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines())
    return re.sub(r" --commit \S+", "", facts["command"]), int(facts["device"].split()[0])


def measure(path: Path, command: str, gpus: int) -> int:
    """Run a command, and return its exit status."""
    done = subprocess.run([sys.executable, *shlex.split(command)[1:]], stdout=subprocess.PIPE, text=True)
    if path.suffix == ".txt":
        name = subprocess.check_output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], text=True)
        versions = ", ".join(map(" ".join, bench.versions().items()))
        head = f"device: {gpus} {name.splitlines()[0]} (gpu)\nversions: {versions}\ncommit: {bench.head()}\n"
        path.write_text(f"{head}command: {command}\n\n{done.stdout}")
    return done.returncode


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    parser.add_argument("--only", nargs="+", choices=FILES, default=[*FILES.keys() - GONE], metavar="NAME")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="every N-th command, from the K-th on")
    parser.add_argument("--gpus", type=int, default=1, help="only commands that ran on this many GPUs")
    options = parser.parse_args(arguments)
    first, step = map(int, options.part.split("/"))
    commands = {name: recorded(FILES[name]) for name in sorted(options.only)}
    failed = False
    for name in [name for name in commands if commands[name][1] == options.gpus][first - 1 :: step]:
        print(f"{name}: {commands[name][0]}", flush=True)
        if not options.list:
            failed |= measure(FILES[name], *commands[name]) != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
