"""The training program's step at the sizes of a config: time, memory, utilisation, and the losses of a batch.

    python -m benchmarks.training [--config configs/llama3-8b-one-gpu.yaml] [--variants "" "KEY=VALUE ..."] [--out FILE]

Each variant overrides keys of the config, separated by spaces, and has a state of its own, so they run one after
another. All steps have one batch of random tokens, so that their losses fall. `device_gib`: what JAX may use of the
device, by XLA_PYTHON_CLIENT_MEM_FRACTION; `host_gib`: what XLA may pin, by XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import bench
from benchmarks.bench import cells, markdown
from jaxoffload import compiler_options
from jaxoffload._engine.host.limit import host_pool_bytes
from jaxoffload.proof._program.memory import device_bytes
from models.config import Config, load
from models.sharding import make_mesh
from models.step import Program, program, shardings_of
from models.train import limit_pinned_memory, lowered_step
from models.transformer import flops_per_token


def devices_of(config: Config) -> int:
    return math.prod(dataclasses.astuple(config.mesh))


def telling_losses(step: bench.Step) -> bench.Step:
    """Return a step, (state, tokens) -> (state, tokens), that adds each loss to its facts."""
    run, losses = step.run, step.facts.setdefault("losses", [])

    def tell(state: Any, tokens: Any) -> tuple[Any, Any]:
        state, metrics = run(state, tokens)
        losses.append(round(float(metrics["loss"]), 4))
        return state, tokens

    return step._replace(run=tell) if run else step


def initial(config: Config, made: Program) -> tuple[Any, Any]:
    """Return the first state, and random tokens."""
    state = jax.jit(made.init, out_shardings=shardings_of(made.state))()
    draw = functools.partial(jax.random.randint, minval=0, maxval=config.model.vocab_size, dtype=jnp.int32)
    of_key = lambda: draw(jax.random.key(1), made.tokens.shape)
    return state, jax.jit(of_key, out_shardings=made.tokens.sharding)()


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    for variant in options.variants:
        config = load(options.config, variant.split())
        made = program(config, make_mesh(config.mesh, jax.devices()[: devices_of(config)]))
        step = bench.compiled(lowered_step(made, compiler_options()))
        tokens = step.facts["tokens"] = config.train.batch_size * config.train.seq_len
        flops = tokens * flops_per_token(config.model, config.train.seq_len) / devices_of(config)
        make: Callable[[], Any] = functools.partial(initial, config, made)
        yield bench.Group((), {(variant or "as it is", "defaults"): telling_losses(step)}, make, flops, 1)


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    return {f"{name}, thousand tokens/s": round(of["tokens"] / of["ms"], 3) for name, of in modes.items() if "ms" in of}


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    head = ("", "step", "temporary device memory", "model FLOP utilisation")
    return markdown(head, *([name, *cells(of)] for name, of in result["modes"].items() if "ms" in of))


def parse() -> argparse.Namespace:
    more = {"config": "configs/llama3-8b-one-gpu.yaml", "variants": [""], "rounds": 0}
    return bench.parser(__doc__, "training", **more).parse_args()


if __name__ == "__main__":
    limit_pinned_memory()
    bench.prepare()
    options = parse()
    devices = devices_of(load(options.config, options.variants[0].split()))
    memory = {"device_gib": device_bytes(), "host_gib": host_pool_bytes()}
    shape = {"config": options.config} | {name: size and round(size / bench.GIB, 2) for name, size in memory.items()}
    print(table(bench.main("training", options, groups, ratios, devices, shape=shape)))
