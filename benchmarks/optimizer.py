"""AdamW with its state on the host, on the device, and moved there whole: layers over microbatches, bfloat16 weights.

    python -m benchmarks.optimizer [--layers 32 --batch 1 --seq 4096 --microbatches 32] [--out FILE]
    python -m benchmarks.optimizer --layers 16 --microbatches 8 --modes sgd host device whole host_float32 --out FILE
    python -m benchmarks.optimizer --fsdp 2 --batch 2 --modes host device --out FILE

A step sums the gradients of the microbatches and updates. Each mode has a state of its own, so they run one after
another. `update` is the update alone; `gb_each_way` is what each device fetches, and writes, by `placements`, and
`host_state_gib` what it keeps on the host, by XLA; `bus_gb_s`: what the bus copies each way while it copies both ways.
`equal`: whether 20 steps of six layers have the same bits with the state on the host and on the device.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxoffload
from benchmarks import bench
from benchmarks.bench import cells, markdown
from benchmarks.cases import OVERLAP, SIZES, accumulated, loss_of, model_flops, ours, placed, shape_of, state_of
from benchmarks.dense import CASE
from jaxoffload import Policy
from jaxoffload.proof._predict.measure import bus
from jaxoffload.proof._program.exact import repeatable_options

MODES = {
    "sgd": "plain SGD, which has no state",
    "host": "state on the host, moments in bfloat16",
    "host_float32": "state on the host, moments in float32",
    "device": "state on the device, moments in bfloat16",
    "whole": "state on the host, moved by JAX in whole arrays, as MaxText does",
    "update": "the update alone, state on the host, moments in bfloat16",
}
VARIANT = ours(dict.fromkeys(CASE.moved, "offload"))
STEPS = 20


def optimizer_of(options: argparse.Namespace, mode: str) -> Any:
    """Return AdamW with float32 masters, whose state is where the mode has it."""
    policy = Policy(default="save" if mode in ("device", "whole") else "offload")
    dtype = None if mode == "host_float32" else jnp.bfloat16
    shardings = jax.tree.map(lambda x: x.sharding, state_of(CASE, options)[0][0])
    tx = optax.adamw(1e-5, b2=0.95, weight_decay=0.1)
    return jaxoffload.host_optimizer(tx, policy=policy, shardings=shardings, masters=True, state_dtype=dtype)


def step_of(options: argparse.Namespace, mode: str) -> Any:
    """Return a step, ((weights, state), batch) -> the same."""
    tx, gradients = optimizer_of(options, mode), accumulated(loss_of(CASE, options, VARIANT))
    to = lambda tree, place: jax.tree.map(lambda x: jax.device_put(x, place) if x.ndim else x, tree)

    def step(of: Any, batch: Any) -> Any:
        weights, state = of
        if mode == "update":
            return tx.apply(weights, weights, state), batch
        found = gradients(weights, batch)
        if mode == "sgd":
            return (jax.tree.map(lambda w, g: w - (1e-6 * g).astype(w.dtype), weights, found), state), batch
        if mode == "whole":
            weights, state = tx.apply(found, weights, to(state, jax.memory.Space.Device))
            return (weights, to(state, jax.memory.Space.Host)), batch
        return tx.apply(found, weights, state), batch

    return step


def abstract(options: argparse.Namespace, mode: str) -> Any:
    """Return the weights and the state, and all microbatches: shapes, dtypes and shardings."""
    weights, batch = state_of(CASE, options, options.microbatches)[0]
    weights = jax.tree.map(lambda w: w.update(dtype=jnp.bfloat16), weights)
    if mode == "sgd":
        return (weights, ()), batch
    tx = optimizer_of(options, mode)
    state, where = jax.eval_shape(tx.init, weights), tx.state_shardings(weights)
    if mode == "whole":
        where = jax.tree.map(lambda x, of: of.with_memory_kind("pinned_host") if x.ndim else of, state, where)
    return (weights, placed(state, where)), batch


def initial(options: argparse.Namespace, mode: str) -> Any:
    """Return `abstract` as arrays."""
    (weights, state), batch = abstract(options, mode)

    def drawn(n: int, x: Any) -> Any:
        draw = lambda: 0.02 * jax.random.normal(jax.random.key(n), x.shape, x.dtype)
        return jax.jit(draw, out_shardings=x.sharding)()

    weights = jax.tree.unflatten(
        jax.tree.structure(weights), itertools.starmap(drawn, enumerate(jax.tree.leaves(weights)))
    )
    if mode != "sgd":
        made = optimizer_of(options, mode).init(weights)
        state = jax.tree.map(lambda x, of: jax.device_put(x, of.sharding), made, state)
    return (weights, state), 50 * drawn(-1, batch)


def equal(options: argparse.Namespace) -> bool:
    """Return if weights, moments and remainders have the same bits after STEPS steps."""
    # XLA's option for deterministic kernels does not reach all of cuDNN's.
    few = argparse.Namespace(**vars(options) | {"layers": 6, "microbatches": 2, "attention": "xla"})

    def after(mode: str) -> list[Any]:
        step = jax.jit(step_of(few, mode), donate_argnums=0, compiler_options=repeatable_options())
        of, batch = initial(few, mode)
        for _ in range(STEPS):
            of, batch = step(of, batch)
        return [np.asarray(x) for x in jax.tree.leaves(of)]

    return all(map(np.array_equal, after("host"), after("device")))


def groups(options: argparse.Namespace) -> Iterator[bench.Group]:
    if unknown := set(options.modes) - MODES.keys():
        raise SystemExit(f"--modes: {', '.join(sorted(unknown))}: not among {', '.join(MODES)}")
    for mode in options.modes:
        args = abstract(options, mode)
        step = bench.compiled(bench.lowered(step_of(options, mode), args, OVERLAP))
        if mode not in ("sgd", "device", "whole"):
            on_host = optimizer_of(options, mode).placements(args[0][0]).host_bytes
            step.facts["gb_each_way"] = round(on_host / options.fsdp / 1e9, 3)
        flops = None if mode == "update" else options.microbatches * model_flops(CASE, options)
        make = functools.partial(initial, options, mode)
        yield bench.Group((), {(mode, "overlap"): step}, make, flops, 1)


def ratios(modes: dict[str, Any], options: argparse.Namespace) -> dict[str, float]:
    pairs = [(mode, "sgd") for mode in ("host", "host_float32", "device", "whole")]
    found = bench.ratios(modes, [*pairs, ("host", "device"), ("whole", "host")])
    if "ms" in (update := modes.get("update", {})):
        found["update, GB/s each way"] = round(1e3 * update["gb_each_way"] / update["ms"], 3)
        found["update, of the bus's rate"] = round(found["update, GB/s each way"] / options.bus_gb_s, 3)
    return found


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    ran = ((what, result["modes"].get(mode, {})) for mode, what in MODES.items())
    head = ("", "step", "device memory", "model FLOP utilisation")
    return markdown(head, *([what, *cells(of, "all_gib"), ""][:4] for what, of in ran if "ms" in of))


def parse() -> argparse.Namespace:
    sizes = SIZES | {"layers": 32, "batch": 1, "seq": 4096}
    more = {"modes": [*MODES], "microbatches": 32, "rounds": 1}
    return bench.parser(__doc__, "optimizer", **sizes, **more).parse_args()


if __name__ == "__main__":
    options = parse()
    bench.prepare(options.attention)
    on_gpu = jax.default_backend() == "gpu"
    options.bus_gb_s = round(bus(jax.devices()[: options.fsdp], scale=1 if on_gpu else 64).together, 2)
    more = {"shape": shape_of(options) | {"dtype": "bfloat16"}, "bus_gb_s": options.bus_gb_s}
    result = bench.main("optimizer", options, groups, ratios, **more)
    bench.write(options, result | {"equal": equal(options)})
    print(table(result))
