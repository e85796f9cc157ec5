"""Results of programs, compared bit for bit, and whether equal ones are evidence."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def numbers(tree: Any) -> Any:
    """Return the leaves as numpy arrays; of an array that other processes hold too, this one's shards."""

    def of_leaf(x: Any) -> np.ndarray:
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        return np.asarray(x) if x.is_fully_addressable else np.stack([np.asarray(s.data) for s in x.addressable_shards])

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
