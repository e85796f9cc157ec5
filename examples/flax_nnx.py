"""Flax NNX: the layers are one module with stacked parameters, scanned under a policy. python examples/flax_nnx.py"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxoffload
from jaxoffload import Policy, tag

LAYERS, BATCH, WIDTH, HIDDEN = 4, 256, 64, 256
policy = Policy(residuals={"fc1": "offload"}, default="recompute", min_offload_bytes="64KiB")


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.fc2 = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        fc1 = tag(self.fc1(tag(x, "layer_input")), "fc1")
        return x + self.fc2(tag(nnx.gelu(fc1), "act"))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(
            rngs
        )  # each parameter has a leading axis of layers

    def __call__(self, x):
        structure, parameters = nnx.split(self.layers)
        run = lambda x, one: (nnx.merge(structure, one)(x), None)
        return jaxoffload.scan(run, x, parameters, policy=policy)[0]


def main():
    structure, parameters = nnx.split(Model(nnx.Rngs(0)))
    optimizer = optax.adam(1e-3)
    x, target = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))

    def loss(parameters, x, target):
        return jnp.mean((nnx.merge(structure, parameters)(x) - target) ** 2)

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
