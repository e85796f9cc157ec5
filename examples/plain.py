"""Plain JAX: a stack of layers learns a random map, with one residual offloaded. python examples/plain.py"""

import jax
import jax.numpy as jnp

import jaxoffload
from jaxoffload import Policy, tag

LAYERS, BATCH, WIDTH, HIDDEN = 4, 256, 64, 256
policy = Policy(residuals={"fc1": "offload"}, default="recompute", min_offload_bytes="64KiB")


def layer(x, w):  # x (BATCH, WIDTH)
    x = tag(x, "layer_input")
    fc1 = tag(x @ w["in"], "fc1")
    act = tag(jax.nn.gelu(fc1), "act")
    return x + act @ w["out"], None


def loss(weights, x, target):
    y, _ = jaxoffload.scan(layer, x, weights, policy=policy)
    return jnp.mean((y - target) ** 2)


def step(weights, x, target):
    value, gradients = jax.value_and_grad(loss)(weights, x, target)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def main():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "in": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)),
        "out": 0.1 * jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)),
    }
    x = jax.random.normal(keys[2], (BATCH, WIDTH))
    target = x @ jax.random.normal(keys[3], (WIDTH, WIDTH)) / WIDTH**0.5

    print(jaxoffload.residuals(loss, weights, x, target))
    train = jax.jit(step, compiler_options=jaxoffload.compiler_options())
    for number in range(5):
        value, weights = train(weights, x, target)
        print(f"step {number}: loss {value:.4f}")


if __name__ == "__main__":
    main()
