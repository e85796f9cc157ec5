"""What a config needs: its residuals, the bytes of the state, and the policy planned for a budget."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

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
    mesh = abstract_mesh(config.mesh)
    config, plan = planned(traceable(config), mesh)
    made = program(config, mesh)
    lines = [*([str(plan)] if plan else []), summary(config, made)]
    if file := config.remat.machine:
        machine = proof.Machine.from_json(Path(file).read_text())
        lines.append(str(proof.predict(made.step, made.state, made.tokens, machine=machine)))
    return "\n".join(lines)


def summary(config: Config, made: Program) -> str:
    """Return the residual table of a microbatch, and the bytes on each device of the state.

    Raises:
      UserError: the policy does not fit the model or this machine.
    """
    train, stages = config.train, config.mesh.stage
    schedule = Schedule(stages, train.virtual_stages, train.grad_accumulation)
    alone = of_one_stage(config)
    jaxoffload.check(made.step, made.state, made.tokens, policy=config.remat)
    table = jaxoffload.residuals(alone.loss, alone.state.params, alone.microbatch)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))
    lines = [f"{count:,} parameters, {flops_per_token(config.model, train.seq_len) / 1e9:.3g} GFLOP per token"]
    if stages > 1:
        idle = f"{schedule.ticks} ticks, idle for {schedule.bubble:.1%} of a step; {schedule.slots} slots"
        lines += [
            f"{schedule.microbatches} microbatches on {stages} stages, {schedule.chunks} chunks of layers; {idle}"
        ]
        lines += ["the table is of one microbatch, as if the devices of one stage ran all layers"]
    elif schedule.microbatches > 1:
        how = "interleaved" if may_interleave(train) and table.host_bytes > 0 else "one after another"
        lines += [f"{schedule.microbatches} microbatches {how}; the table is of one"]
    sizes = {
        "parameters": device_bytes(made.state.params),
        "optimizer": device_bytes(made.state.optimizer),
        "optimizer on the host": device_bytes(made.state.optimizer, "pinned_host"),
    }
    lines += [str(table), *(f"{name:22} {in_mib(size):>14} per device" for name, size in sizes.items() if size)]
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
    """Return the config with the policy planned for `remat.budget`, and the plan; as it is if it has no budget. Where
    nothing fits otherwise, the optimizer's state goes to the host.

    Raises:
      UserError: nothing fits, or nothing can be planned here.
    """
    remat = config.remat
    if remat.budget is None:
        return config, None
    made = program(config, mesh)
    budget = None if remat.budget == "auto" else remat.budget
    how: dict[str, Any] = {"budget": budget, "host_budget": remat.host_budget, "machine": remat.machine}
    try:
        plan = jaxoffload.plan(made.step, made.state, made.tokens, fixed=remat.fixed, **how)
        return replace(config, remat=replace(remat, **asdict(plan.policy))), plan
    except proof.NothingFits:
        if (moved := with_state_on_host(config)) is None:
            raise
    return planned(moved, mesh)


def with_state_on_host(config: Config) -> Config | None:
    """Return the config with the optimizer's state on the host; None if it does not leave that open."""
    is_open = config.train.optimizer_on_host == "auto" and config.train.virtual_stages == 1
    return replace(config, train=replace(config.train, optimizer_on_host=True)) if is_open else None
