"""Whether a claim holds by what was measured, and the record of that."""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results/claims.json"
HOLDS, FAILS, NOT_RUN = "holds", "fails", "not run"
COMPARE = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq}

Requirement = Sequence[Any]  # [where a number stands ..., how it compares, a bound or where that stands ...]


def judge(requires: Sequence[Requirement], result: Any) -> tuple[str, list[list[Any]]]:
    """The verdict, and what was found for each requirement; of a number that is not there: not run."""
    verdicts, found = [], []
    for requirement in requires:
        path, compare, bound = parts(requirement)
        numbers, bounds = values(result, path), bound if len(bound) == 1 else values(result, bound)
        right = all(COMPARE[compare](a, b) for a in numbers for b in bounds)
        verdicts.append((HOLDS if right else FAILS) if numbers and bounds else NOT_RUN)
        found.append(numbers)
    return worst(verdicts), found


def parts(requirement: Requirement) -> tuple[Sequence[Any], str, Sequence[Any]]:
    at = next(i for i, step in enumerate(requirement) if isinstance(step, str) and step in COMPARE)
    return requirement[:at], requirement[at], requirement[at + 1 :]


def values(result: Any, path: Sequence[Any]) -> list[Any]:
    """What stands at a path of keys, null aside; an object in it chooses the items of a list that have what it has."""
    if not path:
        return [] if result is None else [result]
    step, *rest = path
    if isinstance(step, dict):
        items = [item for item in result if all(item.get(key) == value for key, value in step.items())]
        return [value for item in items for value in values(item, rest)]
    return values(result[step], rest) if isinstance(result, dict) and step in result else []


def worst(verdicts: Iterable[str]) -> str:
    """Of none: not run."""
    verdicts = set(verdicts) or {NOT_RUN}
    return next(verdict for verdict in (FAILS, NOT_RUN, HOLDS) if verdict in verdicts)


def as_text(requirement: Requirement) -> str:
    items = lambda step: f"[{', '.join(f'{key}: {value}' for key, value in step.items())}]"
    return " ".join(items(step) if isinstance(step, dict) else str(step) for step in requirement)


# ------------------------------------------------------------------------------------------------ the record


def record(says: str, command: str, requires: Sequence[Requirement], result: Any) -> dict[str, Any]:
    verdict, measured = judge(requires, result)
    required = [as_text(requirement) for requirement in requires]
    return {"says": says, "command": command, "measured": measured, "required": required, "verdict": verdict}


def still(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The verdict of an earlier record; of another sentence, command or requirement it says nothing."""
    same = all(before.get(key) == now[key] for key in ("says", "command", "required"))
    return before["verdict"] if same else NOT_RUN


def records(path: Path = RESULTS) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def merge(measured: dict[str, Any], path: Path = RESULTS) -> None:
    """Adds to the file; what another part measured stays."""
    path.write_text(json.dumps(dict(sorted((records(path) | measured).items())), indent=1) + "\n")


def found(one: Mapping[str, Any]) -> str:
    """Of a record: what was required, and in brackets what was measured."""
    both = zip(one["required"], one["measured"], strict=True)
    return "; ".join(f"{required} ({', '.join(map(str, numbers)) or 'nothing'})" for required, numbers in both)
