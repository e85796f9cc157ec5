"""Random layers in the styles of other libraries: what real models contract, reduce, normalise and drop.

A layer is a residual stream through two or three blocks, each with names on some of its values. A draw also decides
what happens to each name, the dtype and the number of layers. `draw(seed)` is deterministic.
"""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

HEADS = 2


class Block(NamedTuple):
    """`apply(x (batch, seq, dim), weights, key, tag) -> an array like x`, and the shapes of its weights."""

    apply: Callable[..., Any]
    shapes: Mapping[str, tuple[int, ...]]


class Drawn(NamedTuple):
    """`layer(x, (weights, key), tag) -> x`, and the stacked arguments of all layers."""

    layer: Callable[..., Any]
    x: jax.Array
    xs: Any
    rules: dict[str, str]
    blocks: tuple[str, ...]


def layer_norm(x, scale, bias):
    mean = jnp.mean(x, -1, keepdims=True)
    var = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias


def rms_norm(x, scale, bias):
    """As Llama computes it: in float32, whatever the layer's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


NORMS = {"layer_norm": layer_norm, "rms_norm": rms_norm}
ACTIVATIONS = {
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_by_hand": lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
    "relu_squared": lambda x: jnp.maximum(x, 0) ** 2,
}


def dropout(x, key, rate=0.25):
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)


def mlp(norm, act, drop, x, w, key, tag):
    up = tag(NORMS[norm](x, w["scale"], w["bias"]) @ w["in"] + w["b_in"], "fc1")
    out = tag(ACTIVATIONS[act](up), "act") @ w["out"]
    return dropout(out, key) if drop else out


def attention(norm, by_hand, drop, x, w, key, tag):
    h = NORMS[norm](x, w["scale"], w["bias"])
    q, k, v = (jnp.einsum("bsd,dnh->bsnh", h, w[name]) for name in ("q", "k", "v"))
    q, v = tag(q, "q"), tag(v, "v")
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool))[None, None], scores, -1e9)
    if by_hand:
        top = lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
        exps = jnp.exp(scores - top)
        seen = exps / jnp.sum(exps, -1, keepdims=True)
    else:
        seen = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype)
    seen = dropout(seen, key) if drop else seen
    context = tag(jnp.einsum("bnqk,bknh->bqnh", seen, v), "context")
    return jnp.einsum("bqnh,nhd->bqd", context, w["o"])


def conv(act, x, w, key, tag):
    """A causal convolution over the sequence, and a depthwise one, as in state-space models."""
    numbers = ("NHC", "HIO", "NHC")
    h = lax.conv_general_dilated(x, w["kernel"], (1,), [(2, 0)], dimension_numbers=numbers)
    h = ACTIVATIONS[act](tag(h, "conv"))
    return lax.conv_general_dilated(
        h, w["depthwise"], (1,), [(2, 0)], dimension_numbers=numbers, feature_group_count=x.shape[-1]
    )


def tied_matmuls(x, w, key, tag):
    """tanh between a matmul and one with the same matrix, transposed."""
    return jnp.tanh(jnp.tanh(tag(x @ w["square"], "fc1")) @ w["square"].T)


def mixture(x, w, key, tag):
    """Every expert computes every token; a softmax weights them. These are einsums with batch dimensions."""
    gates = tag(jax.nn.softmax(x @ w["router"], -1), "gates")
    up = tag(jnp.einsum("bsd,edf->besf", x, w["experts_in"]), "fc1")
    return jnp.einsum("bse,besf,efd->bsd", gates, jax.nn.silu(up), w["experts_out"])


def _blocks(dice: random.Random, dim: int, wide: int) -> dict[str, Block]:
    norm, act, drop = dice.choice(list(NORMS)), dice.choice(list(ACTIVATIONS)), dice.random() < 0.5
    by_hand, maybe = dice.random() < 0.5, lambda fact, word: f", {word}" if fact else ""
    scale = {"scale": (dim,), "bias": (dim,)}
    linear = {**scale, "in": (dim, wide), "b_in": (wide,), "out": (wide, dim)}
    head = dim // HEADS
    return {
        f"mlp({norm}, {act}{maybe(drop, 'dropout')})": Block(functools.partial(mlp, norm, act, drop), linear),
        f"attention({norm}{maybe(by_hand, 'by hand')}{maybe(drop, 'dropout')})": Block(
            functools.partial(attention, norm, by_hand, drop),
            {**scale, **dict.fromkeys("qkv", (dim, HEADS, head)), "o": (HEADS, head, dim)},
        ),
        f"conv({act})": Block(functools.partial(conv, act), {"kernel": (3, dim, dim), "depthwise": (3, 1, dim)}),
        "tied matmuls": Block(tied_matmuls, {"square": (dim, dim)}),
        "mixture": Block(mixture, {"router": (dim, 3), "experts_in": (3, dim, wide), "experts_out": (3, wide, dim)}),
    }


def draw(seed: int) -> Drawn:
    """Draw a layer in which at least one name is offloaded, so that there is something to verify."""
    dice = random.Random(seed)
    batch, seq, dim, wide = (
        dice.choice([1, 2, 4]),
        dice.choice([1, 4, 8]),
        dice.choice([8, 16, 32]),
        dice.choice([8, 24]),
    )
    every = _blocks(dice, dim, wide)
    chosen = dice.sample(list(every), dice.choice([1, 1, 2]))
    dtype = dice.choice([jnp.float32, jnp.float32, jnp.bfloat16])
    layers = dice.choice([2, 3, 4])
    post_norm, size = dice.random() < 0.3, dice.choice([0.3, 1.0])

    def layer(x, of_layer, tag=checkpoint_name):
        weights, keys = of_layer
        x = tag(x, "layer_input")
        for number, name in enumerate(chosen):
            here = lambda value, what, number=number: tag(value, f"b{number}/{what}")
            x = x + every[name].apply(x, weights[number], keys[number], here)
            if post_norm:
                x = layer_norm(x, jnp.ones(dim, x.dtype), jnp.zeros(dim, x.dtype))
        return x

    def weight(number, what, shape):
        key = jax.random.fold_in(jax.random.key(seed), number)
        drawn = jax.random.normal(jax.random.fold_in(key, len(what) + ord(what[0])), (layers, *shape))
        return (drawn * size * shape[0] ** -0.5 + (what == "scale")).astype(dtype)

    weights = [
        {what: weight(number, what, shape) for what, shape in every[name].shapes.items()}
        for number, name in enumerate(chosen)
    ]
    xs = (weights, jax.random.split(jax.random.key(seed + 1), (layers, len(chosen))))
    x = jax.random.normal(jax.random.key(seed + 2), (batch, seq, dim), dtype)
    found: list[str] = []
    first = jax.tree.map(lambda a: a[0], xs)
    jax.eval_shape(lambda x, xs: layer(x, xs, lambda value, name: (found.append(name), value)[1]), x, first)
    rules = {name: dice.choice(["save", "offload", "recompute"]) for name in found}
    rules[dice.choice([name for name in found if name != "layer_input"])] = "offload"
    return Drawn(layer, x, xs, rules, tuple(chosen))
