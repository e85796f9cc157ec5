"""Train a small Llama on the bytes of Python's own library: Flax NNX, Optax, Orbax, Grain, and activations offloaded.

    python examples/train_llama.py runs/llama              half a minute on a CPU
    python examples/train_llama.py runs/llama --steps 200  goes on from its checkpoint

Each layer names its residuals with `tag`, a Policy decides on them, `scan` runs the layers under it, and `accumulate`
runs the backward pass of one microbatch beside the forward pass of the next, so that copies hide behind both.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jaxoffload
import jaxoffload.nnx
from jaxoffload import Policy, scope, tag

# ---- sizes ----

WORDS = 256  # a token is a byte
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN = 4, 128, 4, 2, 32, 384
SEQUENCE, ROWS, MICROBATCHES = 128, 4, 4  # a step takes MICROBATCHES * ROWS sequences
LEARNING_RATE, WARMUP = 3e-3, 20

# What happens to each residual. At real sizes leave out min_offload_bytes: what is smaller than 1 MiB is then saved.
POLICY = Policy(
    residuals={
        "layer_input": "offload",
        "attn/*": "save",
        "mlp/fc1": "offload",  # both of its leaves, gate and up
    },
    default="recompute",  # what an MLP reads, its norm, and its activation
    min_offload_bytes=0,
)


# ---- data: random windows of a text, whose order depends on the seed alone ----


class Windows:
    """Sequences of SEQUENCE + 1 bytes, one behind the other."""

    def __init__(self, text: bytes):
        self.tokens = np.frombuffer(text, np.uint8)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // SEQUENCE

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[number * SEQUENCE : (number + 1) * SEQUENCE + 1].astype(np.int32)


def batches(files: list[Path]) -> grain.DatasetIterator:
    """Return an endless iterator over (MICROBATCHES, ROWS, SEQUENCE + 1) tokens, with get_state and set_state."""
    windows = Windows(b"\n".join(file.read_bytes() for file in files))
    data = grain.MapDataset.source(windows).seed(0).shuffle().repeat()
    return iter(data.batch(ROWS).batch(MICROBATCHES).to_iter_dataset())


# ---- model ----


def rope(x: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + HEAD / 2) of each head, (rows, sequence, heads, HEAD), by their positions."""
    frequencies = 10_000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angles = jnp.outer(jnp.arange(x.shape[1]), frequencies)[None, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def linear(into: int, out: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(into, out, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = linear(WIDTH, HEADS * HEAD, rngs)
        self.k, self.v = linear(WIDTH, KV_HEADS * HEAD, rngs), linear(WIDTH, KV_HEADS * HEAD, rngs)
        self.out = linear(HEADS * HEAD, WIDTH, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = lambda x: x.reshape(*x.shape[:2], -1, HEAD)
        with scope("attn"):
            x = tag(self.norm(x), "norm")
            # Tagged after RoPE: there the backward pass of attention reads them.
            q, k = tag(rope(heads(self.q(x))), "q"), tag(rope(heads(self.k(x))), "k")
            v = tag(heads(self.v(x)), "v")
            # On an NVIDIA GPU, in bfloat16, implementation="cudnn" is flash attention.
            context = tag(jax.nn.dot_product_attention(q, k, v, is_causal=True), "context")
            return self.out(context.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate, self.up = linear(WIDTH, HIDDEN, rngs), linear(WIDTH, HIDDEN, rngs)
        self.down = linear(HIDDEN, WIDTH, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with scope("mlp"):
            x = tag(self.norm(x), "norm")
            fc1 = tag({"gate": self.gate(x), "up": self.up(x)}, "fc1")
            return self.down(tag(nnx.silu(fc1["gate"]) * fc1["up"], "act"))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention, self.mlp = Attention(rngs), MLP(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = tag(x, "layer_input")
        x = tag(x + self.attention(x), "mlp_input")
        return x + self.mlp(x)


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        # One module, each of whose parameters has a leading axis of layers.
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer))(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = linear(WIDTH, WORDS, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of each next token, (rows, sequence, WORDS)."""
        how = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
        through = jaxoffload.nnx.scan(lambda layer, x: layer(x), policy=POLICY, **how)
        return self.head(self.norm(through(self.layers, self.embedding(tokens))))


# ---- training ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the checkpoints")
    parser.add_argument("--steps", type=int, default=100, help="of the whole run")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--text", default=f"{sysconfig.get_path('stdlib')}/*.py", help="a glob")
    options = parser.parse_args()

    data = batches(sorted(Path("/").glob(str(Path(options.text).absolute()).lstrip("/"))))
    graph, params = nnx.split(Llama(nnx.Rngs(0)))
    schedule = optax.linear_schedule(0.0, LEARNING_RATE, WARMUP)  # constant after that, however many steps
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = {"params": params, "optimizer": optimizer.init(params)}

    def loss(params: nnx.State, tokens: jax.Array) -> jax.Array:
        """Return the mean cross-entropy, in nats per byte, on one microbatch."""
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    def step(state: dict, tokens: jax.Array) -> tuple[dict, jax.Array]:
        value, gradients = jaxoffload.accumulate(loss)(state["params"], tokens)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    train = jax.jit(step, donate_argnums=0, compiler_options=jaxoffload.compiler_options())
    with ocp.CheckpointManager(options.out.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2)) as saved:
        done = saved.latest_step() or 0
        if done:
            restore = ocp.args.Composite(state=ocp.args.StandardRestore(state), data=ocp.args.JsonRestore())
            found = saved.restore(done, args=restore)
            state = found["state"]
            data.set_state(found["data"])
            print(f"continuing from step {done}")
        else:
            example = jax.ShapeDtypeStruct((ROWS, SEQUENCE + 1), jnp.int32)
            print(jaxoffload.residuals(loss, params, example))
        begin = time.monotonic()
        for number in range(done + 1, options.steps + 1):
            state, value = train(state, next(data))
            if number % 10 == 0:
                print(f"step {number}: loss {value:.4f}, {time.monotonic() - begin:.0f} s")
            if number % options.save_every == 0 or number == options.steps:
                keep = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data.get_state()))
                saved.save(number, args=keep)


if __name__ == "__main__":
    main()
