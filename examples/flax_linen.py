"""Flax Linen: a module's parameters are stacked and scanned under a policy. python examples/flax_linen.py"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxoffload
from jaxoffload import Policy, tag

LAYERS, BATCH, WIDTH, HIDDEN = 4, 256, 64, 256
policy = Policy(residuals={"fc1": "offload"}, default="recompute", min_offload_bytes="64KiB")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        fc1 = tag(nn.Dense(HIDDEN)(tag(x, "layer_input")), "fc1")
        return x + nn.Dense(WIDTH)(tag(nn.gelu(fc1), "act"))


def forward(parameters, x):
    run = lambda x, one: (Layer().apply(one, x), None)
    return jaxoffload.scan(run, x, parameters, policy=policy)[0]


def loss(parameters, x, target):
    return jnp.mean((forward(parameters, x) - target) ** 2)


def main():
    x, target = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))
    keys = jax.random.split(jax.random.key(0), LAYERS)
    parameters = jax.vmap(Layer().init, in_axes=(0, None))(keys, x)  # each has a leading axis of layers
    optimizer = optax.adam(1e-3)

    def step(parameters, state):
        value, gradients = jax.value_and_grad(loss)(parameters, x, target)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(parameters, updates), state

    print(jaxoffload.residuals(loss, parameters, x, target))
    train = jax.jit(step, compiler_options=jaxoffload.compiler_options())
    state = optimizer.init(parameters)
    for number in range(5):
        value, parameters, state = train(parameters, state)
        print(f"step {number}: loss {value:.4f}")


if __name__ == "__main__":
    main()
