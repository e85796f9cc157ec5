"""The peak of allocated device memory of a function and of its reference, each in a process that does nothing else.

For the command line, before it touches a GPU itself: what a process has allocated before cannot be told apart.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..._compiler_options import compiler_options
from ..._engine.reference import as_reference
from .._program.target import compiled, target_of
from .checks import need, reference_that_fits


class Peaks(NamedTuple):
    """In bytes, of one device; `most`: of how many layers of each scan the first ran, None for all."""

    ours: int
    reference: int
    most: int | None


def peaks_of(command: Sequence[str]) -> Peaks | str:
    """Of what a command, a process of this module's `measured`, prints; or why there are none."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not any(map(importlib.util.find_spec, _PLUGINS)):
        return "this is no GPU"
    reference = _run([*command, "--peak", "reference"])
    if isinstance(reference, str):
        return reference
    if "why" in reference:
        return str(reference["why"])
    ours = _run([*command, "--peak", "ours", "--layers", str(reference["most"] or 0)])
    return ours if isinstance(ours, str) else Peaks(ours["peak"], reference["peak"], reference["most"])


_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def _run(command: Sequence[str]) -> dict[str, Any] | str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return f"that process ended with exit status {done.returncode}: {said[-1] if said else 'it said nothing'}"
    return json.loads(printed[-1])


def measured(f: Any, args: tuple[Any, ...], whose: str, most: int | None, has_aux: bool = False) -> dict[str, Any]:
    """What `peaks_of` reads: the peak after three runs on zeros, which take no other memory to make.

    Args:
      whose: "reference", then of as many layers as fit; or "ours", then of the first `most` layers of each scan.
      has_aux: as for `verify`.
    """
    if jax.default_backend() != "gpu":
        return {"why": "this is no GPU"}
    zeros = jax.tree.map(_zeros, args)
    target = target_of(f, zeros, has_aux=has_aux)
    if target.loss is None:
        return {"why": "a step's residuals are inside of it"}
    if whose == "reference":
        if (fitting := reference_that_fits(target)) is None:
            return {"why": need(target.reference_program)}
        most, run = fitting.most, as_reference(fitting.run)
    else:
        run = (target.with_layers(most) if most else target).run
    program = compiled(run, zeros, compiler_options())
    for _ in range(3):
        jax.block_until_ready(program(*zeros))
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"peak": stats["peak_bytes_in_use"], "most": most}


def _zeros(x: Any) -> Any:
    return jnp.zeros(jnp.shape(x), jnp.result_type(x), device=getattr(x, "sharding", None))
