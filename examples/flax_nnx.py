"""Flax NNX: the layers are one module with stacked parameters, scanned under a policy. python examples/flax_nnx.py"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxoffload.nnx
from jaxoffload import Policy, tag

LAYERS, BATCH, WIDTH, HIDDEN = 4, 256, 64, 256
policy = Policy(residuals={"fc1": "offload"}, default="recompute", min_offload_bytes="64KiB")


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.fc1, self.fc2 = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.01, rngs=rngs)

    def __call__(self, x):
        fc1 = tag(self.fc1(tag(x, "layer_input")), "fc1")
        return x + self.fc2(self.dropout(tag(nnx.gelu(fc1), "act")))


class Model(nnx.Module):
    def __init__(self, rngs):  # each parameter has a leading axis of layers
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)

    def __call__(self, x):
        run = jaxoffload.nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, policy=policy)
        return run(x, self.layers)


def loss(model, x, target):
    return jnp.mean((model(x) - target) ** 2)


def main():
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    x, target = jax.random.normal(jax.random.key(1), (2, BATCH, WIDTH))
    print(jaxoffload.residuals(loss, model, x, target))
    graph, state = nnx.split((model, optimizer))  # nnx.jit takes no compiler_options

    def step(state):
        model, optimizer = nnx.merge(graph, state)
        value, gradients = nnx.value_and_grad(loss)(model, x, target)
        optimizer.update(model, gradients)
        return value, nnx.state((model, optimizer))

    train = jax.jit(step, donate_argnums=0, compiler_options=jaxoffload.compiler_options())
    for number in range(5):
        value, state = train(state)
        print(f"step {number}: loss {value:.4f}")
    nnx.update((model, optimizer), state)


if __name__ == "__main__":
    main()
