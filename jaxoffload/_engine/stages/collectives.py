"""Refuse collectives in the layers of pipeline stages for which the devices of several stages would have to meet.

Each stage runs its layers in a branch of its own, and an operation of two branches is two operations. Collectives meet
within a group of devices, here those of one stage: they work. A collective-permute has no groups. XLA has all devices
meet for it, so those of one stage would wait for ever for those of another (docs/upstream.md#collective-permutes).
"""

import re
from collections import defaultdict
from collections.abc import Iterable

from jax.extend.core import Jaxpr
from jax.extend.core.primitives import ppermute_p

from ..._jax import Compilation, axes_named, where_written
from ..jaxprs.walk import walk

BRANCHES = "jaxoffload.stage"  # the scope of the switch between the stages' branches

_COMPUTATION = re.compile(r"(?:ENTRY )?%(\S+) \(")  # instructions are indented
_SWITCH = re.compile(rf' conditional\(.*\bop_name="[^"]*/{re.escape(BRANCHES)}/cond"')
_WITHOUT_GROUPS = re.compile(r" (collective-permute|send|recv)(?:-start)?\((?!.*is_host_transfer=true)")
_CALLED = re.compile(r"\b(?:\w+_computations?|calls|body|condition|to_apply)=(%[\w.\-]+|\{%[^}]*\})")
# The path of an operation inside of its branch, and what of it is not the user's.
_PATH = re.compile(rf'\bop_name="[^"]*/{re.escape(BRANCHES)}/cond/branch_\d+_fun/([^"]*)"')
_OURS = {"while", "body", "eval_jaxpr", "closed_call", "checkpoint", "rematted_computation"}


def refuse_traced(axis: str, layers: Iterable[Jaxpr], branches: bool = True) -> None:
    """Raise if a pass of a layer, forward or backward, has such a collective.

    `axis`: of the stages. `branches`: each stage has one.
    """
    for eqn in (site.eqn for jaxpr in layers for site in walk(jaxpr)):
        axes = axes_named(eqn)
        if axis in axes:
            why = "stages run different layers, for different microbatches"
            advice = f"layers may communicate over the other axes, but not over {axis!r}"
        elif branches and eqn.primitive is ppermute_p:
            why = f"{_WHY}; in the layers use lax.all_gather or lax.all_to_all"
            advice = "or accumulate without stages: docs/stages.md#layers-that-communicate"
        else:
            continue
        calls = f"a layer calls {eqn.primitive.name} over {', '.join(map(repr, axes))} ({where_written(eqn)})"
        raise NotImplementedError(f"accumulate: stages={axis!r}: {calls}; {why}; {advice}")


_WHY = (
    "XLA has all devices meet for that, and stages run their layers in branches of their own, so that they would wait "
    "for each other for ever"
)


def refuse_compiled(compilation: Compilation) -> None:
    """Raise if XLA has put such a collective into a branch."""
    if found := in_branches(compilation.text):
        what = "; ".join(f"{kind} for {', '.join(paths[:3])}" if paths else kind for kind, paths in found.items())
        raise NotImplementedError(
            f"accumulate: stages: XLA sends arrays of a layer from device to device ({what}); {_WHY}; in the layers "
            "neither shift, roll nor slice along an axis that is divided, nor change which axis is divided, or "
            "accumulate without stages: docs/stages.md#layers-that-communicate"
        )


def in_branches(text: str) -> dict[str, list[str]]:
    """The kinds of collectives without groups in the branches of stages, each with the operations that it is for.

    `text`: of a compiled program.
    """
    lines = defaultdict[str, list[str]](list)
    computation = ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        computation = begins[1] if begins else computation
        lines[computation].append(line)
    called = lambda line: [name for names in _CALLED.findall(line) for name in re.findall(r"%([\w.\-]+)", names)]
    waiting = [name for inside in lines.values() for line in inside if _SWITCH.search(line) for name in called(line)]
    seen: set[str] = set()
    found = defaultdict[str, dict[str, None]](dict)
    while waiting:
        if (computation := waiting.pop()) in seen:
            continue
        seen.add(computation)
        for line in lines[computation]:
            waiting += called(line)
            if match := _WITHOUT_GROUPS.search(line):
                path = _PATH.search(line)
                parts = [part for part in path[1].split("/") if part not in _OURS] if path else []
                found[match[1]] |= {"/".join(parts): None} if parts else {}
    return {kind: list(paths) for kind, paths in found.items()}
