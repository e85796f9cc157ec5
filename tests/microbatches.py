"""A small language model in layers with names."""

import jax
import jax.numpy as jnp
import numpy as np
from autodiff import in_a_loop
from common import normal, policy
from jax import lax

from jaxoffload import scan, tag

WORDS, DIM = 11, 8
RULES = {"x": "offload", "fc1": "offload", "act": "recompute"}


def params_of(layers):
    return {
        "embedding": normal(0, (WORDS, DIM)),
        "w": normal(1, (layers, DIM, DIM)) / 3,
        "bias": normal(2, (layers, DIM)),
        "mixer": normal(3, (DIM, DIM)) / 3,
        "out": normal(4, (DIM, WORDS)),
    }


def layer(x, w):
    x = tag(x, "x")
    fc1 = tag(x @ w["w"] + jnp.broadcast_to(w["bias"], x.shape), "fc1")
    return x + tag(jnp.tanh(fc1), "act"), jnp.sum(fc1**2)


def plain(step, init, xs, rules, **how):
    """The reference of `ours`: nothing of jaxoffload's."""
    kept = [name for name, decision in rules.items() if decision != "recompute"]
    return lax.scan(in_a_loop(step, *kept), init, xs, **how)


def ours(step, init, xs, rules, strict=True, **how):
    return scan(step, init, xs, policy=policy(rules), strict=strict, **how)


def of_layers(params):
    return {"w": params["w"], "bias": params["bias"]}


def tokens(microbatches, rows=2):
    return jnp.asarray(np.random.default_rng(7).integers(0, WORDS, (microbatches, rows, 5), np.int32))


def language_model(stack, params, tokens):
    """Tied embeddings, a matrix that all layers share, ys, other results."""

    def mixed(x, w):
        y, size = layer(x, w)
        return y @ params["mixer"], size

    y, sizes = stack(mixed, params["embedding"][tokens], of_layers(params), RULES)
    logits = y @ params["out"] + y @ params["embedding"].T
    targets = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    loss = jnp.mean(jax.nn.logsumexp(logits, -1) - targets) + 1e-3 * jnp.sum(sizes)
    return loss, {"sizes": sizes, "rows": tokens[0, 0]}
