"""YAML files and key=value overrides to dataclasses; every problem is collected: key, value, what is allowed."""

import contextlib
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from jaxoffload import Problem, UserError
from models import plain
from models.files import FULL, Unwritable
from models.plain import shown
from models.text import closest, short


class ConfigError(UserError, ValueError):
    """The config cannot run. The message of each problem has the key, its value and what is allowed."""


def problem(key: str, value: object, why: str) -> Problem:
    """Return a problem with the value of a key. `value` is formatted with str: pass its repr, or `short` of it."""
    return Problem(key, f"{key} = {value}: {why}")


def config_error(key: str, value: object, why: str) -> ConfigError:
    """Return the error with one `problem`."""
    return ConfigError([problem(key, value, why)])


def has_problem(problems: Iterable[Problem], *keys: str) -> bool:
    """Return whether a problem is about one of these keys, an entry of one, or the section of one."""
    inside = lambda key, section: key == section or key.startswith((f"{section}.", f"{section}["))
    return any(inside(p.key, key) or inside(key, p.key) for p in problems for key in keys)


@contextlib.contextmanager
def as_config_error(key: str, value: Any, allowed: str) -> Iterator[None]:
    """Raise an OSError as a ConfigError about this key.

    Raises:
      Unwritable: the disk is full, which is no fault of the config.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise Unwritable(error.errno, error.strerror, error.filename or str(value)) from error
        raise config_error(key, repr(value), f"{one_line(error)}; must be {allowed}") from error


@contextlib.contextmanager
def collecting(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a ConfigError to the list, and suppress it."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class Range(NamedTuple):
    """The numbers that a field may have; `low` itself is excluded if `above`."""

    low: float
    high: float = 1e30  # the numbers become float32
    above: bool = False

    def holds(self, number: float) -> bool:
        low = number > self.low if self.above else number >= self.low
        return low and number <= self.high

    def __str__(self) -> str:
        low, high = (str(n) if isinstance(n, int) else f"{n:g}" for n in (self.low, self.high))
        return f"above {low}, at most {high}" if self.above else f"from {low} to {high}"


# ---- from a file and overrides to a tree ----


_MAX_BYTES = 2**20


def read(path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """Return the mapping in a YAML file, and a problem for each duplicate key.

    Raises:
      ConfigError: the file does not exist, is not YAML or not a mapping, or exceeds the limits of a config.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise plain.Refused(f"more than {_MAX_BYTES} bytes; must be a YAML file of sections")
        tree, duplicates = plain.load(text.decode())
    except FileNotFoundError:
        others = [str(other) for other in sorted(path.parent.glob("*.yaml"))]
        instead = advice(str(path), others) if others else "; give a YAML file, such as configs/tiny.yaml"
        raise _unreadable(path, f"no such file{instead}") from None
    except plain.Refused as error:
        raise _unreadable(path, str(error)) from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with NUL
        raise _unreadable(shown(str(path), 4096), f"cannot be read ({error}); must be a YAML file") from None
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise config_error(str(path), short(tree), "must be a mapping of sections")
    return tree, duplicates


def _unreadable(path: Path | str, why: str) -> ConfigError:
    return ConfigError([Problem(str(path), f"{path}: {why}")])


_OVERRIDE = re.compile(r"(?P<section>\w+)\.(?P<key>\w+)(\[(?P<entry>.+)\])?=(?P<value>.*)", re.DOTALL)


def override(tree: dict[str, Any], text: str) -> list[Problem]:
    """Put one section.key=value, or section.key[entry]=value, into the tree; return the problems."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        dotted = re.match(r"(\w+\.\w+)\.([^=]+)=", text)
        instead = f"; an entry of a mapping is {dotted[1]}[{shown(dotted[2])}]=value" if dotted else ""
        why = f"an override must be section.key=value, such as train.steps=10{instead}"
        return [Problem(shown(text), f"{shown(text)}: {why}")]
    section, key, entry, source = match.group("section", "key", "entry", "value")
    try:
        value, duplicates = plain.load(source, f"{section}.{key}.")
    except plain.Refused as error:
        return [problem(f"{section}.{key}", shown(source), str(error))]
    if tree.get(section) is None:
        tree[section] = {}
    target = tree[section]
    if not isinstance(target, dict):
        return duplicates  # the section itself is the problem, and is reported
    if entry is not None:
        entries = target.get(key) or {}
        if not isinstance(entries, dict):
            line = (
                f"{section}.{key}[{shown(entry)}] = {shown(source)}: {section}.{key} = {short(entries)} has no entries"
            )
            return [Problem(f"{section}.{key}", line)]
        # After all others: the last of several matching patterns wins.
        value = {**{name: other for name, other in entries.items() if name != entry}, entry: value}
    target[key] = value
    return duplicates


# ---- from a tree to dataclasses ----


def known_entries(section: str, tree: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[Problem]]:
    """Return the entries of a section that have one of these names, and a problem for each other entry."""
    problems = []
    for name in [name for name in tree if name not in names]:
        why = f"no such key{advice(str(name), names, f'{section}.')}"
        problems.append(problem(f"{section}.{shown(str(name))}", short(tree[name]), why))
    return {name: value for name, value in tree.items() if name in names}, problems


def typed_values(
    section: str, tree: Mapping[str, Any], hints: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values that fit the types of their fields, converted, and a problem for each other value."""
    values, problems = {}, []
    for name, value in tree.items():
        hint, converted = hints[name], _convert(value, hints[name])
        if converted is not _MISFIT:
            values[name] = converted
            continue
        close = closest(value, _choices(hint))
        near = f"; the nearest is {close}" if close else ""
        problems.append(problem(f"{section}.{name}", short(value), f"must be {_describe(hint)}{near}"))
    return values, problems


def _choices(hint: Any) -> list[str]:
    """Return the words that a field allows."""
    origin, args = get_origin(hint), get_args(hint)
    return list(args) if origin is Literal else [w for arg in args for w in _choices(arg)] if origin in _UNION else []


_MISFIT = object()
_UNION = (Union, types.UnionType)


def _convert(value: Any, hint: Any) -> Any:
    """Return the value in the type of its field, or _MISFIT."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in _UNION:
        return next((v for v in (_convert(value, arg) for arg in args) if v is not _MISFIT), _MISFIT)
    if origin is Annotated:
        number = _convert(value, args[0])
        return number if number is not _MISFIT and args[1].holds(number) else _MISFIT
    if origin is Literal:
        return value if value in args else _MISFIT
    if origin is tuple and isinstance(value, list):
        hints = args[:1] * len(value) if args[-1] is ... else args
        items = tuple(map(_convert, value, hints))
        return items if len(value) == len(hints) and _MISFIT not in items else _MISFIT
    if hint is int and type(value) is float and value.is_integer():
        return int(value)  # 1e5
    if hint is float and type(value) is int:
        return float(value) if abs(value) <= sys.float_info.max else _MISFIT
    return value if type(value) is hint else _MISFIT


def _describe(hint: Any) -> str:
    """Return what a field allows, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in _UNION:
        return " or ".join(_describe(arg) for arg in args)
    if origin is Annotated:
        return f"{_describe(args[0])} {args[1]}"
    if origin is Literal:
        return " or ".join(args)
    if origin is tuple:
        return "a list of strings" if args[-1] is ... else f"[{', '.join(map(_describe, args))}]"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(hint, "null")


# ---- text for messages ----


def advice(name: str, names: Sequence[str], prefix: str = "") -> str:
    """Return what to write instead: the nearest name, or all of them."""
    close = closest(name, names)
    return f"; the nearest is {prefix}{close}" if close else f"; allowed: {', '.join(prefix + n for n in names)}"


def one_line(error: BaseException) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split())
