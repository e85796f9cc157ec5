"""With a jaxlib that returns wrong gradients, every way to offload on a GPU is refused."""

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from autodiff import gradient
from common import normal, policy
from flax import linen, nnx
from jax import lax

from jaxoffload import chain, checkpoint, scan, tag

X, W = normal(0, (4, 8)), normal(1, (8, 8))


def linen_block(rules):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return jnp.sin(linen.Dense(8)(jnp.sin(tag(linen.Dense(8)(x), "fc1"))))

    block = linen.remat(Block, policy=rules)()
    dense = lambda x, w: {"kernel": w, "bias": x[0]}
    return lambda x, w: block.apply({"params": {"Dense_0": dense(x, w), "Dense_1": dense(x, w)}}, x)


def one_layer(x, w):
    """Its second matmul has no name."""
    return jnp.sin(jnp.sin(tag(x @ w, "fc1")) @ w)


def scanned(rules):
    return lambda x, w: scan(lambda x, w: (one_layer(x, w), None), x, w[None], policy=rules)[0]


WAYS = {
    "scan": scanned,
    "chain": lambda rules: lambda x, w: chain([one_layer, one_layer], x, [w, w], policy=rules),
    "checkpoint": lambda rules: checkpoint(one_layer, policy=rules),
    "jax.checkpoint": lambda rules: jax.checkpoint(one_layer, policy=rules),
    "linen.remat": linen_block,
    "nnx.remat": lambda rules: nnx.remat(one_layer, policy=rules),
    "scan in scan": lambda rules: lambda x, w: lax.scan(lambda x, w: (scanned(rules)(x, w), None), x, w[None])[0],
    "scan in jit": lambda rules: jax.jit(scanned(rules)),
    "vmap of scan": lambda rules: jax.vmap(scanned(rules), (0, None)),
}


ASKED = {"residuals": {"fc1": "offload"}, "default": "offload", "dots": "offload"}


@pytest.mark.claim("wrong-gradients")
@pytest.mark.parametrize(
    "way, field",
    [(way, field) for way in WAYS for field in ASKED if (way, field) != ("vmap of scan", "dots")],  # has a batch
)
def test_every_way_to_offload_is_refused_while_it_is_traced(monkeypatch, way, field):
    """So before anything is compiled. The first correct jaxlib, and saving with any, are not refused."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = X[None] if way == "vmap of scan" else X
    rules = policy(**{"resident_layers": 0, field: ASKED[field]})
    trace = lambda rules: jax.make_jaxpr(gradient(WAYS[way](rules), (0, 1)))(x, W)
    for version in ("0.10.2", "0.11.1"):
        monkeypatch.setattr(jaxlib, "__version__", version)
        with pytest.raises(
            NotImplementedError, match=rf"jaxlib {version} returns wrong gradients.*install jaxlib >= 0"
        ):
            trace(rules)
        trace(policy(default="save", dots="save"))
    for version in ("0.11.2", "0.12.0.1"):
        monkeypatch.setattr(jaxlib, "__version__", version)
        assert "<host>" in str(trace(rules))
