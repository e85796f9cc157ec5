"""The report of a config: the residual table, what runs beside what, and the bytes that training needs."""

import jax

from jaxoffload import Residuals, proof
from jaxoffload.grouped import chosen_backend
from models.config import Config, Mesh
from models.moe import grouped_gemms
from models.needs import (
    Memory,
    Weighed,
    interleaves,
    layers_of_a_chunk,
    parameter_count,
    prediction,
    schedule_of,
    stages,
    traced_program,
    weighed,
)
from models.sharding import inside_shard_map
from models.step import Program
from models.text import readable
from models.transformer import flops_per_token


def report(config: Config) -> str:
    """Return the table and the bytes that training needs, on the mesh of the config, on any machine.

    On GPUs that `proof.machine` has measured, also what is predicted of a step.

    Raises:
      ConfigError: as `summary`.
    """
    traced, made, plan = traced_program(config)
    found = weighed(traced, made)
    lines = "\n".join([*([str(plan)] if plan else []), summary(traced, made, found)])
    if predicted := prediction(made, found):
        lines += f"\n{predicted}"
    if traced.model.attention != config.model.attention:
        lines += (
            f"\n(model.attention = {config.model.attention!r} was traced as cudnn: no CUDA here. Its residuals are "
            "the same, but for attn/context.2, the state of random numbers.)"
        )
    if traced.model.grouped != config.model.grouped:
        lines += f"\n(model.grouped = {config.model.grouped!r} was traced as {traced.model.grouped}: no CUDA here.)"
    return lines


def summary(config: Config, made: Program, found: Weighed | None = None) -> str:
    """Return what a run prints before it compiles. `found`: what `weighed` returned, if it was called.

    Raises:
      ConfigError: the policy does not fit the traced step or this machine.
    """
    table, needed, _ = found or weighed(config, made)
    about = [model_line(config, made), *backend_lines(config), *microbatch_lines(config, made, table)]
    stages = stage_lines(config, made, table) if config.mesh.stage > 1 else []
    return "\n".join([*about, str(table), *stages, *memory_lines(config, made, table, needed)])


def model_line(config: Config, made: Program) -> str:
    """Return the size of the model, and its FLOPs."""
    flops = flops_per_token(config.model, config.train.seq_len)
    return f"{parameter_count(made):,} parameters, {flops / 1e9:.3g} GFLOP per token"


def backend_lines(config: Config) -> list[str]:
    """Return the backend of the experts' grouped GEMMs, if there are any; `auto` chooses for this machine."""
    model = config.model
    if not model.experts:
        return []
    if model.grouped != "auto":
        return [f"grouped GEMMs: {model.grouped}"]

    def chosen(sizes: Mesh) -> str:
        with inside_shard_map(sizes):
            backends = [chosen_backend(x, w, quantize=model.quantize) for x, w in grouped_gemms(config)]
        return ", ".join(dict.fromkeys(backends))

    here, alone = chosen(config.mesh), chosen(Mesh())
    hint = f"; {alone} with a process for each GPU" if alone != here else ""
    return [f"grouped GEMMs: {here} (auto{hint})"]


def microbatch_lines(config: Config, made: Program, table: Residuals) -> list[str]:
    """Return whether the microbatches interleave, if there are several, and what then runs alone."""
    count, train = config.train.grad_accumulation, config.train
    if config.mesh.stage > 1:
        each = f"{layers_of_a_chunk(config)} layers in each of {train.virtual_stages * config.mesh.stage} chunks"
        line = f"microbatches: {count}, on {config.mesh.stage} pipeline stages; {each}"
        devices = made.tokens.sharding.mesh.size // config.mesh.stage
        where = "the device of one stage" if devices == 1 else f"the {devices} devices of one stage"
        return [line, f"the table is of one microbatch, as if {where} ran all layers"]
    if count == 1:
        return []
    if not interleaves(config, table):
        why = "train.interleave = False" if config.train.interleave is False else "nothing is offloaded"
        return [f"{count} microbatches one after another ({why}); the table is of one"]
    fill = sum(row.bytes_per_device for row in table if row.state == "offloaded")
    return [
        f"{count} microbatches interleaved; the table is of one",
        f"the first forward pass runs alone: it copies at most {readable(fill)} per device to the host",
    ]


def stage_lines(config: Config, made: Program, table: Residuals) -> list[str]:
    """Return the bubble, and a line for each stage."""
    schedule = schedule_of(config)
    lines = [
        f"{schedule.ticks} ticks; each stage is idle for {schedule.bubble:.1%} of a step; {schedule.slots} slots",
        "stage  layers               in flight        host      device    each way  (bytes on one of its devices)",
    ]
    for number, stage in enumerate(stages(config, made, table)):
        sizes = " ".join(f"{readable(size):>11}" for size in (stage.host, stage.device, stage.each_way))
        lines.append(f"{number:<6} {', '.join(stage.layers):20} {stage.in_flight:9} {sizes}")
    return lines


def memory_lines(config: Config, made: Program, table: Residuals, found: Memory) -> list[str]:
    """Return lines of the bytes of each kind, in total and per device."""
    how_many = ", of two microbatches" if interleaves(config, table) else ""
    if config.mesh.stage > 1:
        how_many = f", in {schedule_of(config).slots} slots"
    rows = {
        "parameters": (*found.parameters, ""),
        "gradients": (*found.gradients, ""),
        "optimizer": (*found.optimizer, ""),
        "residuals on the device": (*found.on_device, how_many),
        "residuals on the host": (*found.on_host, how_many),
    }
    return [
        *(
            f"{name:24} {readable(total):>12}  {readable(each):>12} per device{of}"
            for name, (total, each, of) in rows.items()
        ),
    ]


def compiled_memory(compiled: jax.stages.Compiled) -> str:
    """Return the memory that the compiled step needs on each device, as XLA plans it."""
    if (plan := proof.memory_plan(compiled)) is None:
        return "XLA does not say how much memory the compiled step needs"
    arguments = plan.argument_size_in_bytes
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    device = arguments + outputs + plan.temp_size_in_bytes
    host = plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes
    return (
        f"the compiled step needs {readable(device)} on each device (arguments {readable(arguments)}, new outputs "
        f"{readable(outputs)}, temporaries {readable(plan.temp_size_in_bytes)}) and {readable(host)} of host memory"
    )
