"""Flax Linen: a policy in nn.remat under nn.scan, and `offload` around the loss. python examples/flax_linen.py"""

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
    def __call__(self, x, _):
        fc1 = tag(nn.Dense(HIDDEN)(tag(x, "layer_input")), "fc1")
        return x + nn.Dense(WIDTH)(tag(nn.gelu(fc1), "act")), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, policy=policy, prevent_cse=False)
        layers = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        return layers()(x, None)[0]


@jaxoffload.offload
def loss(variables, x, target):
    return jnp.mean((Model().apply(variables, x) - target) ** 2)


def main():
    x, target = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))
    variables = Model().init(jax.random.key(0), x)
    optimizer = optax.adam(1e-3)

    def step(variables, state):
        value, gradients = jax.value_and_grad(loss)(variables, x, target)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(variables, updates), state

    print(jaxoffload.residuals(loss, variables, x, target))
    train = jax.jit(step, compiler_options=jaxoffload.compiler_options())
    state = optimizer.init(variables)
    for number in range(5):
        value, variables, state = train(variables, state)
        print(f"step {number}: loss {value:.4f}")


if __name__ == "__main__":
    main()
