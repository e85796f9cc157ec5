"""The peak of allocated device memory of a function and of its reference, each in a process that does nothing else.

The command line asks for it before it touches a GPU: a process's peak includes whatever else it allocated.
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
from ..._tracing import as_reference
from .._program.exact import compiled
from .._program.target import target_of
from .capacity import need, reference_that_fits


class Peaks(NamedTuple):
    """Bytes on one device; `most`: how many layers of each scan ran, the first ones; None for all.

    Example:
      >>> from jaxoffload.proof import Peaks
      >>> peaks = Peaks(ours=17 * 2**30, reference=26 * 2**30, most=None)
      >>> (peaks.reference - peaks.ours) // 2**30
      9
    """

    ours: int
    reference: int
    most: int | None


def peaks_of(command: Sequence[str]) -> Peaks | str:
    """Return what a command, which runs this module's `measured`, prints in fresh processes; or why it cannot.

    Example:
      >>> from jaxoffload.proof import peaks_of
      >>> peaks_of(["jaxoffload", "verify", "models.train:step_for", "configs/llama-1b.yaml"])  # doctest: +SKIP
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not any(map(importlib.util.find_spec, _PLUGINS)):
        return _NO_GPU
    reference = _run([*command, "--peak", "reference"])
    if isinstance(reference, str):
        return reference
    if "why" in reference:
        return str(reference["why"])
    ours = _run([*command, "--peak", "ours", "--layers", str(reference["most"] or 0)])
    return ours if isinstance(ours, str) else Peaks(ours["peak"], reference["peak"], reference["most"])


_NO_GPU = "this needs an NVIDIA GPU"
_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def _run(command: Sequence[str]) -> dict[str, Any] | str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not printed:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        return f"a fresh process ended with exit status {done.returncode}: {errors[-1] if errors else 'no message'}"
    return json.loads(printed[-1])


def measured(f: Any, args: tuple[Any, ...], whose: str, most: int | None, has_aux: bool = False) -> dict[str, Any]:
    """Return what `peaks_of` reads: the peak after three runs on zeros, which take no other memory to make.

    Args:
      whose: "reference", then with as many layers as fit; or "ours", then with the first `most` layers of each scan.
      has_aux: as for `verify`.
    """
    if jax.default_backend() != "gpu":
        return {"why": _NO_GPU}
    zeros = jax.tree.map(_zeros, args)
    target = target_of(f, zeros, has_aux=has_aux)
    if target.loss is None:
        return {"why": "a step's residuals are internal to it"}
    if whose == "reference":
        if (fitting := reference_that_fits(target)) is None:
            return {"why": need(target.reference_program)}
        most, run = fitting.max_layers, as_reference(fitting.run)
    else:
        run = (target.with_layers(most) if most else target).run
    program = compiled(run, zeros, compiler_options())
    for _ in range(3):
        jax.block_until_ready(program(*zeros))
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"peak": stats["peak_bytes_in_use"], "most": most}


def _zeros(x: Any) -> Any:
    return jnp.zeros(jnp.shape(x), jnp.result_type(x), device=getattr(x, "sharding", None))
