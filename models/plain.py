"""YAML text to plain values. Every number is decimal; what is too deep, too long or self-contradictory is refused."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from jaxoffload import Problem

DEEPEST = 20  # mappings and lists inside one another; a config has three
MOST = 10_000  # values, an alias counted as all that it stands for


class Refused(ValueError):
    """Text that is not YAML, or more than a config may be. The message is one line."""


class Unreadable:
    """A value that is not what its tag says, such as `!!int abc`. It fits no field, so the field's line names it."""

    def __init__(self, written: str):
        self._written = written

    def __repr__(self) -> str:
        return self._written


def load(text: str, prefix: str = "") -> tuple[Any, list[Problem]]:
    """The value of a YAML document, None for an empty one; and a problem for each duplicate key, named with the prefix.

    Raises:
      Refused: the text is not YAML, or is more than a config may be.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        duplicates = list(_duplicates(root, prefix))  # first, for `<<` adds to the nodes
        return None if root is None else loader.construct_document(root), duplicates
    except yaml.YAMLError as error:
        raise Refused(f"not YAML: {' '.join(str(error).split())}") from None


_YAML = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 3e-4 as a string, 010 as 8, 1:30 as 90 and 2020-13-45 as a date that does not exist.

    It also builds whatever aliases ask for: nine lists of ten aliases each make a billion values.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[str, int] = {}  # anchor -> values that it stands for; none while it is still open

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event, before = self.peek_event(), self._count
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and event.anchor in self.anchors:
            if event.anchor not in self._sizes:
                raise Refused(f"*{event.anchor} on line {line} stands for what it is in; write the values out")
            self._count += self._sizes[event.anchor]
        else:
            self._count += 1
        if self._count > MOST:
            raise Refused(f"more than {MOST} values on line {line}, with what aliases stand for; write fewer")
        if self._depth > DEEPEST:
            raise Refused(f"more than {DEEPEST} levels deep on line {line}; section, key and entry are three")
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
        except Exception:  # int("abc"), {"yes": True, ...}["maybe"], date(2020, 13, 45): as many as there are tags
            return self.unreadable(node)

    def unreadable(self, node: yaml.Node) -> Unreadable:
        implied = self.resolve(type(node), node.value, (True, False)) == node.tag  # nobody wrote a tag
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
_Loader.add_constructor(None, _Loader.unreadable)  # a tag that nothing reads, such as !ruby/object


def _duplicates(node: yaml.Node | None, prefix: str) -> Iterator[Problem]:
    """YAML itself lets the last of two equal keys win, in silence."""
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
    """The text on one line; of a long one the beginning."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: 2 * longest])
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
