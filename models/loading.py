"""A YAML file and `section.key=value` overrides to a config, with all that is wrong with it."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from jaxoffload import PolicyError, Problem
from models.config import NOT_A_PATH, Config, Remat, is_path
from models.plain import shown
from models.reading import ConfigError, advice, known_entries, override, problem, read, typed_values
from models.relations import broken_relations
from models.text import short

SECTIONS: dict[str, type] = get_type_hints(Config) | {"remat": Remat}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config in a YAML file, with `section.key=value` overrides whose values are YAML.

    `remat.residuals[PATTERN]=save` adds a pattern after those of the file, so that it wins.
    `remat.offload_modules=[moe_act]` replaces the list of the file.

    Raises:
      ConfigError: it lists all problems.
    """
    config, problems = parse(path, overrides)
    if problems:
        raise ConfigError(problems)
    return config


def parse(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[Problem]]:
    """Return the config, as `load` does, and its problems, to which a caller can add others.

    Where a value is wrong, the config holds the default.

    Raises:
      ConfigError: the file cannot be read.
    """
    if not is_path(str(path)):
        raise ConfigError([Problem(str(path), f"{str(path)!r}: {NOT_A_PATH}")])
    path = Path(os.path.expanduser(path))
    tree, problems = read(path)
    for text in overrides:
        problems += override(tree, text)
    config, wrong_values = _parse(tree)
    out = os.path.expanduser(config.train.out or f"runs/{path.stem}")
    return replace(config, train=replace(config.train, out=out)), problems + wrong_values


def _parse(tree: dict[str, Any]) -> tuple[Config, list[Problem]]:
    sections: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in tree.items():
        if name not in SECTIONS:
            why = f"no such section{advice(str(name), list(SECTIONS))}"
            problems.append(problem(shown(str(name)), short(value), why))
        elif not isinstance(value, dict | None):
            problems.append(problem(name, short(value), "must be a mapping of keys to values"))
        else:
            sections[name], in_section = _section(name, value or {})
            problems += in_section
    config = Config(**sections)
    given = {f"{name}.{key}" for name, section in tree.items() if isinstance(section, dict) for key in section}
    wrong_keys = {problem.key for problem in problems}
    return config, problems + broken_relations(config, given, wrong_keys)


def _section(name: str, tree: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """Return the dataclass of one section, and what is wrong with the section."""
    kind = SECTIONS[name]
    given, problems = known_entries(name, tree, list(inspect.signature(kind).parameters))
    if kind is Remat:
        try:
            remat = Remat(**given)
            return (remat if remat.budget is not None else remat.fixed), problems
        except PolicyError as error:
            return Remat(), problems + [problem.under(name) for problem in error.problems]
    values, misfits = typed_values(name, given, get_type_hints(kind, include_extras=True))
    return kind(**values), problems + misfits
