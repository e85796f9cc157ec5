"""The README's claims, and the test or the measurement that checks each.

    python -m benchmarks.claims [--part 1/4 | --only grouped] [--gpus 2]   # adds to benchmarks/results/claims.json
    python -m benchmarks.claims --page                                     # writes benchmarks/CLAIMS.md

A part of several takes at most 8 minutes. This process never touches a GPU. Exit status: 1 if a claim fails, if its
measurement does not say, or if that fails, be it of a test that no claim names.
"""

import argparse
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.judge import FAILS, HOLDS, NOT_RUN, Requirement, as_text, found, merge, record, records, still

FOLDER = Path(__file__).parent
LIST, PAGE = FOLDER / "claims.yaml", FOLDER / "CLAIMS.md"
ALL = (1, 1)  # part of as many
LIMIT = 8 * 60  # seconds of a part of several
SUCCEEDS = ("exit status", "==", 0)

# ------------------------------------------------------------------------------------------------ the list


class Measurement(NamedTuple):
    """A command as a user types it. `seconds`: what it takes on H200s; `gpus`: how many of them it needs."""

    command: str
    seconds: int
    gpus: int = 1


class Claim(NamedTuple):
    """Holds if all its tests pass, and if its measurement gives what is required."""

    says: str  # in README.md, word for word
    tests: Sequence[str] = ()  # pytest's: a file, or a function with all its parameters
    measured: str | None = None  # by which Measurement
    requires: Sequence[Requirement] = ()


class Listed(NamedTuple):
    measurements: dict[str, Measurement]
    claims: dict[str, Claim]

    def judged(self, measurement: str, result: Any) -> dict[str, dict[str, Any]]:
        """The records of its claims, by name."""
        command = self.measurements[measurement].command
        of = {name: claim for name, claim in self.claims.items() if claim.measured == measurement}
        return {name: record(claim.says, command, claim.requires, result) for name, claim in of.items()}


def read(path: Path = LIST) -> Listed:
    kinds = {"measurements": Measurement, "claims": Claim}
    listed = yaml.safe_load(path.read_text())
    return Listed(**{key: {name: kind(**item) for name, item in listed[key].items()} for key, kind in kinds.items()})


def part_of(measurements: Mapping[str, Measurement], number: int, count: int) -> list[str]:
    """Names of those in one of `count` parts that take about as long: the longest first, each to the shortest part."""
    parts: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(measurements, key=lambda name: -measurements[name].seconds):
        min(parts, key=lambda part: sum(measurements[other].seconds for other in part)).append(name)
    return parts[number - 1]


# ------------------------------------------------------------------------------------------------ for people


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Claim, verdict, the beginning of its check."""
    rows = [("claim", "verdict", "check"), *rows]
    wide, narrow = (max(len(row[column]) for row in rows) for column in (0, 1))
    short = lambda check: textwrap.shorten(check, 120, placeholder=" ...")
    return "\n".join(f"{name:{wide}}  {verdict:{narrow}}  {short(check)}" for name, verdict, check in rows)


def recorded(listed: Listed) -> list[tuple[str, str, str]]:
    """A row for each claim that is measured: what was found, the last time."""
    rows, before = [], records()
    for name, now in (item for measurement in listed.measurements for item in listed.judged(measurement, {}).items()):
        verdict = still(before.get(name, {}), now)
        rows.append((name, verdict, found(before[name]) if verdict != NOT_RUN else f"{PAGE.name}#{name}"))
    return rows


def page(listed: Listed) -> str:
    """Each claim under its name, with the commands that check it."""
    sections = [PREFACE]
    for name, claim in listed.claims.items():
        sections.append(f"## {name}\n\n> {claim.says}")
        if claim.tests:
            sections.append("```\npython -m pytest " + " \\\n    ".join(claim.tests) + "\n```")
        if claim.measured:
            command, _, gpus = listed.measurements[claim.measured]
            sections.append(f"On {h200s(gpus)}:\n\n```\n{command}\n```")
            sections.append("\n".join(f"- `{as_text(requirement)}`" for requirement in claim.requires))
    return "\n\n".join(sections) + "\n"


PREFACE = """\
# What README.md claims, and what checks it

<!-- made from benchmarks/claims.yaml by python -m benchmarks.claims --page -->

`make claims` runs the tests and needs no GPU; `make test` runs them among all others. `make claims-gpu PART=1/4`, then
`2/4` to `4/4`, run what needs one H200, each in at most 8 minutes; `make claims-gpu GPUS=2 PART=1/2` and `2/2` what
needs two. What was found, on what, is in [`results/claims.json`](results/claims.json). Below, `OUT.json` and `OUT.xml`
stand for a file, and under a command is what must stand in it."""


def h200s(count: int) -> str:
    return "one H200" if count == 1 else f"{count} H200s"


# ------------------------------------------------------------------------------------------------ the command line


def main(arguments: Sequence[str] | None = None) -> int:
    options, listed = parse(arguments), read()
    if options.page:
        PAGE.write_text(page(listed))
        return 0
    from benchmarks import measure, peers

    devices = measure.devices()
    if len(devices) < options.gpus:
        sys.exit(f"benchmarks.claims: needs {h200s(options.gpus)}; GPUs that are here: {', '.join(devices) or 'none'}")
    about = {"device": f"{options.gpus} {devices[0]}", "versions": peers.versions(), "commit": options.commit}
    judged = dict(measured(listed, options, about))
    print(table((name, one["verdict"], found(one)) for name, one in judged.items()))
    return int(any(one["verdict"] != HOLDS for one in judged.values()))


def measured(
    listed: Listed, options: argparse.Namespace, about: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and records of the claims of a part. They are written after each measurement, so that what stops the next
    takes nothing with it; a measurement that says nothing leaves what was found before. A command that fails has a line
    of its own, which is not written."""
    from benchmarks import measure, peers

    end = time.monotonic() + (LIMIT if options.part != ALL else float("inf"))
    chosen = {name: m for name, m in listed.measurements.items() if m.gpus == options.gpus}
    for measurement in options.only or part_of(chosen, *options.part):
        peers.say(command := chosen[measurement].command)
        result = measure.result_of(command, end - time.monotonic())
        judged = {name: one | about for name, one in listed.judged(measurement, result).items()}
        merge({name: one for name, one in judged.items() if one["verdict"] != NOT_RUN})
        yield from judged.items()
        ended = record("", command, [SUCCEEDS], result)
        if ended["verdict"] == FAILS:
            yield f"{measurement}, the command", ended


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from benchmarks import peers

    measurements = read().measurements
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--part", type=fraction, default=ALL, metavar="I/N")
    which.add_argument("--only", nargs="+", default=[], choices=measurements, metavar="MEASUREMENT")
    parser.add_argument("--gpus", type=int, default=1, help="what needs so many")
    parser.add_argument("--page", action="store_true", help="write CLAIMS.md, and nothing else")
    parser.add_argument("--commit", default=peers.head(), help="recorded beside the numbers")
    options = parser.parse_args(arguments)
    if elsewhere := [name for name in options.only if measurements[name].gpus != options.gpus]:
        needed = measurements[elsewhere[0]].gpus
        parser.error(f"argument --only: {elsewhere[0]} needs --gpus {needed}, and --gpus is {options.gpus}")
    return options


def fraction(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, such as 1/4")
    return int(number), int(count)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or what it started would go on
    sys.exit(main())
