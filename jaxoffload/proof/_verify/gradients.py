"""The claim `gradients`: every result equals the reference's, bit for bit or as far as rounding allows.

The reference is plain `lax.scan` and `jax.checkpoint`, keeping the same values on the device.

Its rounding error is measured. The reference runs again with each floating-point argument moved by one unit in the last
place, up or down at random, and its results move with it: a program that adds and multiplies in another order may
differ by about as much, one that reads a wrong residual differs by far more. Source: the view of rounding errors as
errors of the arguments (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.5).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from ..._engine.jaxprs.walk import walk
from ..._engine.layers.loops import loops_of
from ..._text import first
from .._check import FAILS, HOLDS, NOT_CHECKED, Found
from .._program.exact import exact_options, repeatable_options
from .._program.memory import too_large
from .._program.target import Target

RUNS = 3  # of the reference, with arguments moved
LIMIT = 4.0  # right programs were seen up to 2.7 apart, and those with 0.1 % off one residual 700 and more
CHAOTIC = 0.05  # a reference that moves by this share of its norm has chosen otherwise, as a router does


def gradients(target: Target) -> Found:
    """Compare all results with the reference's."""
    if why := _no_other_program(target):
        return NOT_CHECKED, why
    args = target.arrays
    for options in (repeatable_options, exact_options):  # what XLA fused or contracted in one of them may differ
        program, reference_program = (target.compiled(options, reference) for reference in (False, True))
        if why := too_large(reference_program):
            return NOT_CHECKED, f"the reference {why}; give it fewer layers, or a smaller batch"
        ours, reference, differ = compare(program, reference_program, args)
        if not in_any_process(bool(differ)):
            break
    count = len(jax.tree.leaves(ours))
    equal = f"{count} results are the reference's, bit for bit"
    if in_any_process(bool(differ)):
        verdict, how = _by_rounding(ours, reference, reference_program, args)
        if verdict != HOLDS:
            return verdict, f"{len(differ)} of {count} results differ: {'; '.join(differ[:3])}; {how}"
        equal = f"{count} results are the reference's, {len(differ)} of them not bit for bit: {how}"
    if nothing := no_evidence(ours, args):
        return NOT_CHECKED, f"the results are equal, but {nothing}; give arguments with which they are not"
    gradient = jax.tree_util.tree_leaves_with_path(ours.get("gradient", []))
    zero = [f"args{jax.tree_util.keystr(path)}" for path, leaf in gradient if not leaf.any()]
    return HOLDS, equal + (f"; of them zero: the gradient of {first(zero)}" if zero else "")


def _no_other_program(target: Target) -> str:
    """Return why there is no other program to compare with; empty if there is one."""
    if target.no_reference:
        return target.no_reference
    if any(loops_of(site.eqn) for site in walk(target.reference_jaxpr)):
        return "it was differentiated before verify saw it, so no reference can be built"
    return target.moved_by_others


def compare(program: Any, reference_program: Any, args: tuple[Any, ...]) -> tuple[Any, Any, list[str]]:
    """Return the results of both programs as numpy arrays, and how they differ."""
    ours, reference = numbers(program(*args)), numbers(reference_program(*args))
    return ours, reference, list(differences(ours, reference))


def _by_rounding(ours: Any, reference: Any, reference_program: Any, args: tuple[Any, ...]) -> Found:
    """Check that results which differ do so by rounding alone, in all processes."""
    if in_any_process(bool(why := too_large(reference_program, copies=2))):
        apart = furthest(ours, reference)
        said = f"they are {apart:.2g} of a norm apart; to measure rounding, the reference {why}"
        return FAILS if in_any_process(not apart <= CHAOTIC) else NOT_CHECKED, said
    share, error = rounding(ours, reference, reference_program, args)
    moved = f"{error:.1g} of their norm"
    if in_any_process(not share <= LIMIT):
        return FAILS, f"they differ by {share:.3g} times the reference's own rounding error ({moved})"
    if in_any_process(not error <= CHAOTIC):
        return NOT_CHECKED, f"rounding alone moves the reference's by {moved}"
    return HOLDS, f"they differ by {share:.2g} times the reference's own rounding error ({moved})"


def numbers(tree: Any) -> Any:
    """Return the leaves as numpy arrays; of an array that other processes hold too, this one's shards."""

    def of_leaf(x: Any) -> np.ndarray:
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        if x.is_fully_addressable:
            return np.asarray(x)
        # Of an array with one shard here, `addressable_shards` can raise an error that speaks of two.
        here = range(len(x.sharding.addressable_devices))
        return np.stack([np.asarray(x.addressable_data(n)) for n in here])

    return jax.tree.map(of_leaf, tree)


def differences(ours: Any, reference: Any) -> Iterator[str]:
    """Compare the bits: NaN equals itself, and 0.0 does not equal -0.0."""
    bits = lambda x: np.ascontiguousarray(x).reshape(-1).view(f"u{min(x.dtype.itemsize, 8)}")
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(reference), strict=True):
        if (differ := bits(a) != bits(b)).any():
            differ = differ.reshape(a.size, -1).any(1)
            wide = lambda x: x.reshape(-1).astype(np.complex128)
            by = np.max(np.abs(wide(a) - wide(b))[differ])
            yield f"{jax.tree_util.keystr(path)}: {differ.sum()} of {a.size} values, by up to {by:.3g}"


def no_evidence(results: Any, args: Any) -> str | None:
    """Return why results that are equal prove nothing; None if they do."""
    for path, x in jax.tree_util.tree_leaves_with_path(results):
        if jnp.issubdtype(x.dtype, jnp.inexact) and not np.isfinite(x).all():
            return f"{jax.tree_util.keystr(path)} is not finite"
    if "gradient" in results:
        gradient = jax.tree.leaves(results["gradient"])
        return "all gradients are zero" if gradient and not any(g.any() for g in gradient) else None
    given = jax.tree.leaves(numbers(jax.tree.map(jnp.asarray, args)))
    is_given = lambda x: any(x.shape == a.shape and x.dtype == a.dtype and not any(differences(x, a)) for a in given)
    computed = [x for x in jax.tree.leaves(results) if x.any() and not is_given(x)]
    return None if computed else "they are zero, or are arguments"


def in_any_process(true: bool) -> bool:
    """Return if `true` is so in any process, so that all take the same branch."""
    return bool(np.any(multihost_utils.process_allgather(np.array(true)))) if jax.process_count() > 1 else true


def rounding(ours: Any, reference: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> tuple[float, float]:
    """Return how far results are apart, in units of the reference's rounding error, and that error as a share of the
    results' norm: the greatest of all rows and results.

    Results are trees of numpy arrays as `numbers` returns them; `run(*args)` computes the reference's.
    """
    moved = [jax.tree.leaves(numbers(run(*_moved(args, number)))) for number in range(RUNS)]
    share = error = 0.0
    for i, (a, b) in enumerate(zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True)):
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            share = max(share, 0.0 if np.array_equal(a, b) else np.inf)
            continue
        runs = [leaves[i] for leaves in moved]
        norms, errors = _norms(b), np.max([_norms(run, b) for run in runs], axis=0)
        errors = np.maximum(errors, jnp.finfo(b.dtype).eps * norms)  # the result itself is rounded
        share = max(share, _greatest(_norms(a, b), errors))
        error = max(error, _greatest(np.linalg.norm(errors, keepdims=True), np.linalg.norm(norms, keepdims=True)))
    return share, error


def furthest(ours: Any, reference: Any) -> float:
    """Return how far results are apart, as a share of a row's norm; the greatest of all rows."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True)
    return max((_greatest(_norms(a, b), _norms(b)) for a, b in pairs), default=0.0)


def _greatest(a: np.ndarray, b: np.ndarray) -> float:
    """Return the greatest a / b; 0 for 0 / 0 and for no rows, and infinity where one is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(a == 0, 0.0, a / b)
    return float(np.max(np.where(np.isfinite(ratios), ratios, np.inf), initial=0.0))


def _norms(a: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """Return the norm of a, or of a - b, of each row of a stack: a fault in one layer must not drown in the others'."""
    size = math.prod(a.shape[1:])
    rows = (len(a), size) if a.ndim > 1 and size >= 16 else (1, a.size)  # a few runs tell too little of fewer numbers
    with np.errstate(invalid="ignore", over="ignore"):  # infinities, which are different to `_greatest`
        difference = a.astype(np.complex128) - (0 if b is None else b.astype(np.complex128))
        return np.linalg.norm(np.abs(difference).reshape(rows), axis=1)


def _moved(args: tuple[Any, ...], number: int) -> tuple[Any, ...]:
    """Return the arguments, with each floating-point array on a device moved by one unit in the last place."""
    leaves, tree = jax.tree.flatten(args)
    for n, x in enumerate(leaves):
        sharding = x.sharding if isinstance(x, jax.Array) else None
        is_on_host = sharding is not None and sharding.memory_kind == "pinned_host"
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact) and not is_on_host:
            key = jax.random.fold_in(jax.random.key(number), n)
            leaves[n] = jax.jit(_by_one_ulp, out_shardings=sharding)(x, key)
    return jax.tree.unflatten(tree, leaves)


def _by_one_ulp(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return an array whose elements are moved up or down, at random."""
    eps, up = jnp.finfo(x.dtype).eps, jax.random.bernoulli(key, 0.5, x.shape)
    return x * jnp.where(up, 1 + eps, 1 - eps).astype(x.dtype)
