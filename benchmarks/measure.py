"""A measurement of a claim: a command in processes of its own, and what it found."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


def devices() -> list[str]:
    """The names of this machine's GPUs, by the driver: JAX would take their memory."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return done.stdout.splitlines() if not done.returncode else []


def result_of(command: str, seconds: float) -> dict[str, Any]:
    """What `python ...` wrote to OUT.json or OUT.xml, or else printed, and its exit status.

    After so many seconds it is ended, with all that it started, and nothing of it counts; nor does what it wrote to
    OUT.json before it failed, which may be half of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        _, *words = shlex.split(command)
        arguments = [str(Path(folder, word)) if word.startswith("OUT.") else word for word in words]
        printed = Path(folder, "printed.json")
        with printed.open("w") as out:
            to = out if arguments == words else sys.stderr
            # A session of its own, so that nothing which it started outlives it, on the GPU.
            process = subprocess.Popen([sys.executable, *arguments], stdout=to, start_new_session=True)
            try:
                status = process.wait(max(seconds, 0))
            except subprocess.TimeoutExpired:
                return {}
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        written = next((Path(argument) for argument in arguments if argument.startswith(folder)), printed)
        half = status and written.name == "OUT.json"
        return {**({} if half else in_file(written)), "exit status": status}


def in_file(path: Path) -> dict[str, Any]:
    """A JSON object, or of pytest's `--junitxml` how many tests of each file passed, failed and were skipped; nothing
    where there is none."""
    how = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    with contextlib.suppress(OSError, TypeError, ValueError, ElementTree.ParseError):
        if path.suffix == ".json":
            return dict(json.loads(path.read_text()))
        counts: dict[str, Any] = {}
        for case in ElementTree.parse(path).iter("testcase"):
            file = f"{case.attrib['classname'].replace('.', '/')}.py"
            ended = next((how[child.tag] for child in case if child.tag in how), "passed")
            counts.setdefault(file, dict.fromkeys(("passed", "failed", "skipped"), 0))[ended] += 1
        return counts
    return {}
