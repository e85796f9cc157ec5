"""The ambient record of a trace: the scope of names, whether it is the reference or a trial, what is around the code.

It is part of the key of JAX's trace caches: a jitted function is traced again under another record. So a trace of the
reference, or under a policy on trial, is never taken for one of the program.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
from jax.extend.core import Jaxpr


@dataclasses.dataclass(frozen=True, eq=False)
class Remarks:
    """Texts that `offload` adds while it traces, for the notes of `residuals`' table. No two instances are equal, so
    that JAX traces again what it has traced before.
    """

    texts: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """A policy that `plan` or `predict` tries. No two instances are equal, so that JAX traces again what it has traced.

    Attributes:
      policy: a `Policy`, in place of those that a function gives its scans. A pattern may match nothing.
      scans: those that were traced under it, which live as long: a `Layer` keeps none.
    """

    policy: Any  # `_policy` imports this module
    scans: list[Jaxpr] = dataclasses.field(default_factory=list)

    def traced[F: Callable[..., Any]](self, f: F) -> F:
        """Return `f`, in which each `scan` is under this policy."""
        return under(trial=self)(f)


@dataclasses.dataclass(frozen=True)
class Tracing:
    """The record. Outside the contexts that write them, all fields have these defaults.

    Attributes:
      scope: the prefix of names. Written by `scope`, and emptied where derivatives and forward rules are traced, for
        their names must not depend on the scope that is open; read by `tag` and `grouped_matmul`.
      reference: the reference is traced. Written by `as_reference`; read by the rules of our primitives, by `cached`,
        by `Policy` where JAX asks it, and by `accumulate`.
      around: the `Policy` around a function that is differentiated, and `around_layers`: it is that of layers (`scan`,
        `chain`). Written where a layer is linearized, and by `checkpoint` outside of layers: what one keeps in a layer,
        the layer keeps. Read by the rules of `scan` and `checkpoint`, and by `cached`.
      in_scan: the body of a `scan` is traced. Written by `in_our_scan`; read by `chain`.
      stage_axis: the mesh axis over which the layers are divided; None outside such a loss, and in its scans. Written
        by `accumulate`; read by `scan`.
      trial: the policy that is tried. Written by `Trial.traced`; read by `scan`'s primitive, and by
        `accumulate`, which then asks for no room in the host pool.
      remarks: gathers remarks. Written by `residuals`; read by `offload`.
      whole_program: the host pool is judged once the whole program is traced. Written by `check`, `residuals`,
        `predict` and `plan`; read by `admitted`.
    """

    scope: str = ""
    reference: bool = False
    around: Any = None
    around_layers: bool = False
    in_scan: bool = False
    stage_axis: str | None = None
    trial: Trial | None = None
    remarks: Remarks | None = None
    whole_program: bool = False


_record = jax.make_user_context(Tracing())


def tracing() -> Tracing:
    """Return the current record."""
    return _record.value


@contextlib.contextmanager
def under(**changes: Any) -> Iterator[None]:
    """Trace under the current record with these fields replaced: a context, or a decorator."""
    with _record(dataclasses.replace(tracing(), **changes)):
        yield


def as_reference[F: Callable[..., Any]](f: F) -> F:
    """Return `f`, traced as its own reference: plain `lax.scan` and `jax.checkpoint` that keep the same values, on the
    device.

    It has a plan's names and decisions, but not our loops, copies and ordering. Where one call stands inside another,
    the outer plan decides on the inner one's names too, as JAX's own checkpoints do.
    """
    return under(reference=True)(f)


def alike_everywhere[F: Callable[..., Any]](f: F) -> F:
    """Return `f`, a function of arrays without names and scans, traced once for all records."""
    jitted = jax.jit(f)

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        with _record(Tracing()):
            return jitted(*args)

    return cast(F, call)
