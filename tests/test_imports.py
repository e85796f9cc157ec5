"""Imports run one way, in the library and in the programs: docs/architecture.md."""

import ast
import graphlib
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules_in(*folders):
    """Return the path of each module, by its absolute name."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES, PROGRAMS = modules_in("jaxoffload"), modules_in("models", "benchmarks")


def imports(name, known=MODULES):
    """Yield the absolute names of what a module imports, anywhere in it; of modules, those that are known."""
    path = known[name]
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in known else source


@pytest.mark.parametrize("depth", [1, 2, None], ids=["rooms", "rooms of the proof", "modules"])
def test_no_import_runs_back(depth):
    """`depth`: how many components behind `jaxoffload` name a node; the packages' own `__init__` only re-export."""
    node = lambda name: ".".join(name.split(".")[: depth and depth + 1])
    graph = {}
    for name, path in MODULES.items():
        if path.stem != "__init__" or depth is None:
            graph.setdefault(node(name), set()).update(node(m) for m in imports(name) if m in MODULES)
    edges = {(a, b) for a, targets in graph.items() for b in targets if a != b}
    assert len(edges) > 40
    graphlib.TopologicalSorter({a: {b for x, b in edges if x == a} for a in graph}).prepare()  # raises CycleError


def test_the_engines_rooms_import_down():
    """Each room of the engine imports those before it, and of the top level what knows nothing of the engine."""
    order = ["jaxprs", "host", "decide", "cost", "layers", "microbatches", "stages"]
    rank = {f"jaxoffload._engine.{room}": number for number, room in enumerate(order)}
    room = lambda name: ".".join(name.split(".")[:3])
    below = {name for name in MODULES if name.count(".") == 1 and not any("_engine" in m for m in imports(name))}
    for name in MODULES:
        if room(name) in rank:
            for imported in imports(name) & MODULES.keys():
                inside = room(imported) in rank and rank[room(imported)] <= rank[room(name)]
                assert inside or imported in below, (name, imported)


def test_no_import_of_a_program_runs_back():
    graph = {name: {m for m in imports(name, PROGRAMS) if m in PROGRAMS} for name in PROGRAMS}
    assert sum(map(len, graph.values())) > 40
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


USERS = [path for folder in ("models", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", USERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_programs_use_what_is_public(path):
    """A user could have written them."""
    private = re.compile(r"jaxoffload(\.\w+)*\._")
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)]
        modules = names if isinstance(node, ast.Import) else [f"{getattr(node, 'module', '')}.{n}" for n in names]
        assert not list(filter(private.match, modules)), ast.unparse(node)


OPTIONAL = {"jaxoffload.linen", "jaxoffload.nnx"}  # whoever imports them has Flax


@pytest.mark.parametrize("name", sorted(MODULES.keys() - OPTIONAL))
def test_the_library_needs_jax_and_numpy_alone(name):
    assert OPTIONAL.isdisjoint(imports(name))
    at_import = {m.partition(".")[0] for m in imports(name)}
    assert at_import.isdisjoint({"models", "flax", "optax", "orbax", "grain", "yaml", "benchmarks"})
