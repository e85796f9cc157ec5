"""YAML text to plain values. Numbers are decimal; text that is too deep, too long or refers to itself is refused."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from jaxoffload import Problem

MAX_DEPTH = 20  # mappings and lists inside one another; a config has three
MAX_VALUES = 10_000  # each alias counts as all the values that it stands for


class Refused(ValueError):
    """The text is not YAML, or exceeds the limits of a config. The message is one line."""


class Unreadable:
    """A value that does not have the type of its tag, such as `!!int abc`. It fits no field, whose problem shows it."""

    def __init__(self, written: str):
        self._written = written

    def __repr__(self) -> str:
        return self._written


def load(text: str, prefix: str = "") -> tuple[Any, list[Problem]]:
    """Return the value of a YAML document, None if it is empty, and a problem for each duplicate key.

    `prefix` is put before the keys in problems.

    Raises:
      Refused: the text is not YAML, or exceeds the limits of a config.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        duplicates = list(_duplicates(root, prefix))  # first, because construction expands `<<` in the nodes
        return None if root is None else loader.construct_document(root), duplicates
    except yaml.YAMLError as error:
        raise Refused(f"not YAML: {' '.join(str(error).split())}") from None


_YAML = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """A loader without the surprises of YAML 1.1, and with limits.

    YAML 1.1 reads 3e-4 as a string, 010 as 8, 1:30 as 90, and 2020-13-45 as a date that does not exist. It expands all
    aliases: nine lists of ten aliases each are a billion values.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[str, int] = {}  # anchor -> values that it stands for; absent while it is open

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self._count
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._sizes:
                raise Refused(f"*{event.anchor} on line {line} stands for what it is in; write the values out")
            self._count += self._sizes[event.anchor]
        else:
            self._count += 1
        if self._count > MAX_VALUES:
            raise Refused(f"more than {MAX_VALUES} values on line {line}, with what aliases stand for; write fewer")
        if self._depth > MAX_DEPTH:
            raise Refused(f"more than {MAX_DEPTH} levels deep on line {line}; section, key and entry are three")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent) and event.anchor is not None:
            self._sizes[event.anchor] = self._count - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        except Exception:  # int("abc"), {"yes": True, ...}["maybe"], date(2020, 13, 45): each tag raises its own class
            return self.unreadable(node)

    def unreadable(self, node: yaml.Node) -> Unreadable:
        implied = self.resolve(type(node), node.value, (True, False)) == node.tag  # no tag was written
        return Unreadable(_text(node) if implied else f"{node.tag.replace(_YAML, '!!')} {_text(node)}")


_INT, _FLOAT, _TIME = (_YAML + kind for kind in ("int", "float", "timestamp"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT, _TIME)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?\d+(_\d+)*$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"[-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"),
    list("-+.0123456789"),
)
_Loader.add_constructor(_INT, lambda loader, node: int(loader.construct_scalar(node)))
_Loader.add_constructor(None, _Loader.unreadable)  # unknown tags, such as !ruby/object


def _duplicates(node: yaml.Node | None, prefix: str) -> Iterator[Problem]:
    """Yield a problem for each duplicate key. PyYAML lets the last one win, silently."""
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = f"{prefix}{_text(key)}", key.start_mark.line + 1
        if name in lines:
            why = f"a duplicate key, on lines {lines[name]} and {line}; keep one of them"
            yield Problem(name, f"{name} = {_text(value)}: {why}")
        lines[name] = line
        yield from _duplicates(value, f"{name}.")


def _text(node: yaml.Node) -> str:
    return shown(node.value) if isinstance(node, yaml.ScalarNode) else "..."


def shown(text: str, longest: int = 60) -> str:
    """Return the text on one line, without unprintable characters and cut to a length."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * longest])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
