"""What a config needs: its residuals, their bytes beside those of the state, and the policy planned for a budget."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxoffload
from jaxoffload import Schedule, proof
from models.config import Config
from models.sharding import AnyMesh, abstract_mesh
from models.step import Program, may_interleave, program, traceable
from models.transformer import flops_per_token


def report(config: Config) -> str:
    """Return what a run prints before it compiles and, if the config names a machine, the predicted step.

    On any machine: nothing is allocated. Kernels that need CUDA are traced as others with the same residuals.

    Raises:
      UserError: the config cannot run.
    """
    traced, mesh = traceable(config), abstract_mesh(config.mesh)
    traced, plan = planned(traced, mesh)
    made = program(traced, mesh)
    lines = [*([str(plan)] if plan else []), summary(traced, made)]
    if file := config.remat.machine:
        machine = proof.Machine.from_json(Path(file).read_text())
        lines.append(str(proof.predict(made.step, made.state, made.tokens, machine=machine)))
    return "\n".join(lines)


def summary(config: Config, made: Program) -> str:
    """Return the residual table of a microbatch, and the bytes on each device of the state and of all residuals.

    Raises:
      UserError: the policy does not fit the model or this machine.
    """
    train, stages = config.train, config.mesh.stage
    schedule = Schedule(stages, train.virtual_stages, train.grad_accumulation)
    alone = of_one_stage(config)
    jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    table = jaxoffload.residuals(alone.loss, alone.state.params, alone.microbatch)
    interleaved = stages > 1 or (may_interleave(train) and table.host_bytes > 0)

    def at_once(state: str) -> float:
        """Of layers, those of two interleaved microbatches, or of a stage's slots: a chunk of the layers in each."""
        times = schedule.slots if stages > 1 else 2 if interleaved else 1
        rows = [row for row in table if row.state == state]
        share = lambda row: times / schedule.chunks if row.layers > 1 else times if row.names else 1
        return sum(row.bytes_per_device * share(row) for row in rows)

    in_float32 = jax.tree.map(lambda x: x.update(dtype=jnp.float32), made.state.params)  # several are summed so
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))
    lines = [f"{count:,} parameters, {flops_per_token(config.model, train.seq_len) / 1e9:.3g} GFLOP per token"]
    if stages > 1:
        idle = f"{schedule.ticks} ticks, idle for {schedule.bubble:.1%} of a step; {schedule.slots} slots"
        lines += [
            f"{schedule.microbatches} microbatches on {stages} stages, {schedule.chunks} chunks of layers; {idle}"
        ]
        lines += ["the table is of one microbatch, as if the devices of one stage ran all layers"]
    elif schedule.microbatches > 1:
        how = "interleaved" if interleaved else "one after another"
        lines += [f"{schedule.microbatches} microbatches {how}; the table is of one"]
    sizes = {
        "parameters": device_bytes(made.state.params),
        "gradients": device_bytes(made.state.params if schedule.microbatches == 1 else in_float32),
        "optimizer": device_bytes(made.state.optimizer),
        "residuals on the device": at_once("saved"),
        "residuals on the host": at_once("offloaded"),
    }
    if state := device_bytes(made.state.optimizer, "pinned_host"):
        sizes["optimizer on the host"] = state
    lines += [str(table), *(f"{name:24} {in_mib(size):>14} per device" for name, size in sizes.items())]
    if (pinned := (state + sizes["residuals on the host"]) / 2**30) > 1:
        lines += [f"starting takes about {pinned:.0f} s longer, in which host memory is pinned, once"]
    return "\n".join(lines)


def of_one_stage(config: Config) -> Program:
    """Return the program on one stage's devices, as if they ran all layers: its loss has no stages."""
    remat = config.remat if config.mesh.stage == 1 else replace(config.remat, resident_layers=0)  # no stage has any
    mesh, train = replace(config.mesh, stage=1), replace(config.train, virtual_stages=1)
    return program(replace(config, remat=remat, mesh=mesh, train=train), abstract_mesh(mesh))


def device_bytes(tree: Any, memory: str = "device") -> int:
    """Return the bytes of each device's part of abstract values with shardings, of those in this memory."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if (leaf.sharding.memory_kind or "device") == memory]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def in_mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


def planned(config: Config, mesh: AnyMesh) -> tuple[Config, jaxoffload.Plan | None]:
    """Return the config with the policy planned for `remat.budget`, and the plan; as it is if it has no budget.

    Raises:
      UserError: nothing fits, or nothing can be planned here.
    """
    remat = config.remat
    if remat.budget is None:
        return config, None
    made = program(config, mesh)
    budget, host_budget = (None if size == "auto" else size for size in (remat.budget, remat.host_budget))
    how: dict[str, Any] = {"budget": budget, "host_budget": host_budget, "machine": remat.machine}
    plan = jaxoffload.plan(made.step, made.state, made.tokens, fixed=remat.fixed, **how)
    return replace(config, remat=replace(remat, **asdict(plan.policy))), plan
