"""Text from a checkpoint: python -m models.sample CONFIG --prompt TEXT --tokens 64."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import tokenizers
from flax import nnx

from jaxoffload import Policy
from models import checkpoints, data
from models.config import Config, Mesh
from models.convert import on_one_device
from models.failures import exit_code
from models.loading import load
from models.reading import ConfigError, config_error
from models.sharding import make_mesh
from models.step import program, traceable
from models.transformer import Transformer, logits

USAGE = """\
Continues a text with the parameters of a checkpoint, token by token, on one device. Each token takes a forward pass
over all tokens so far; nothing is kept between them.

  python -m models.sample configs/tiny.yaml --prompt "def main(" --tokens 64 --temperature 0.8 --seed 1"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with these arguments (None: the command line), and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m models.sample", description=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--prompt", default="", help="the text to continue; by default a new document begins")
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens to add; a document may end before")
    parser.add_argument("--temperature", type=float, default=1.0, help="divides the logits; 0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=int, metavar="STEP", help="in train.out; by default the last one")
    parser.add_argument("--begin", metavar="TOKEN", help="stands before the prompt; by default what ends a document")
    options = parser.parse_intermixed_args(arguments)
    if options.tokens < 1 or not options.temperature >= 0:
        parser.error("--tokens must be at least 1, and --temperature at least 0")

    def run() -> None:
        config = load(options.config, options.overrides)
        model, bpe, end = open_model(config, options.checkpoint)
        print(continued(config, model, bpe, end, options))

    return exit_code("cannot sample", run)


def open_model(config: Config, step: int | None) -> tuple[Transformer, tokenizers.Tokenizer, int]:
    """Return a checkpoint's model, the tokenizer of its run, and the token that ends documents.

    Raises:
      ConfigError: there is no such checkpoint, it is damaged or of another model, or the text has changed.
    """
    out = Path(config.train.out)
    saved = checkpoints.at(out, step)
    if unlike := [found for found in checkpoints.differences(config, saved) if found.key.startswith("model.")]:
        raise ConfigError(unlike)
    bpe = data.tokenizer_of(config.data, config.model.vocab_size, saved.data or None)
    # Any attention gives the same, and XLA's has no conditions on the length.
    config = on_one_device(traceable(replace(config, model=replace(config.model, attention="xla"))))
    made = program(config, make_mesh(Mesh(), jax.devices()[:1]))
    params = checkpoints.restore_params(out, saved.step, made.saved.params)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Transformer(config.model, nnx.Rngs(0))))
    return nnx.merge(graph, params), bpe, data.end_of(bpe)


def continued(
    config: Config, model: Transformer, bpe: tokenizers.Tokenizer, end: int, options: argparse.Namespace
) -> str:
    """Return the prompt and its continuation, up to the end of the document.

    Raises:
      ConfigError: they are longer than `train.seq_len`, or the tokenizer has no token `--begin`.
    """
    first = end if options.begin is None else bpe.token_to_id(options.begin)
    if first is None:
        raise config_error("--begin", repr(options.begin), "must be a token of data.tokenizer")
    prompt = [first, *bpe.encode(options.prompt, add_special_tokens=False).ids]
    if (length := len(prompt) + options.tokens) > config.train.seq_len:
        why = f"must be at most train.seq_len = {config.train.seq_len} with the {len(prompt)} tokens of the prompt"
        raise config_error("--tokens", options.tokens, why)
    graph, params = nnx.split(model)
    tokens = jnp.zeros(length, jnp.int32).at[: len(prompt)].set(jnp.array(prompt))

    def generated(params: nnx.State, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return generate(nnx.merge(graph, params), tokens, len(prompt), (options.temperature, end), key)

    found, count = jax.jit(generated)(params, tokens, jax.random.key(options.seed))
    ids = found[1 : int(count)].tolist()
    return bpe.decode(ids[:-1] if ids and ids[-1] == end else ids, skip_special_tokens=False)


def generate(
    model: Transformer, tokens_S: jax.Array, known: int, how: tuple[float, int], key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the tokens, those behind the first `known` replaced by samples, and how many they are.

    `how`: the temperature, and the token after which nothing is sampled.
    """
    temperature, end = how

    def is_open(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        tokens_S, count = state
        return (count < len(tokens_S)) & ((count == known) | (tokens_S[count - 1] != end))

    def add(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens_S, count = state
        x_1xSxD, _ = model(tokens_S[None], Policy())  # causal: what is behind `count` does not matter
        last_1x1xD = jax.lax.dynamic_slice_in_dim(x_1xSxD, count - 1, 1, axis=1)
        logits_V = logits(model, last_1x1xD)[0, 0]
        if temperature:
            token = jax.random.categorical(jax.random.fold_in(key, count), logits_V / temperature)
        else:
            token = jnp.argmax(logits_V)
        return tokens_S.at[count].set(token.astype(tokens_S.dtype)), count + 1

    return jax.lax.while_loop(is_open, add, (tokens_S, jnp.int32(known)))


if __name__ == "__main__":
    sys.exit(main())
