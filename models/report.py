"""What a config needs, from abstract values: the residual table, and the bytes of state and residuals."""

import contextlib
import math
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

import jaxoffload
from jaxoffload import HostPoolFull, PolicyError, Problem, Residual, Residuals, UserError, proof
from jaxoffload.grouped import GroupedMatmulError, chosen_backend
from jaxoffload.proof import Room
from models.config import Config, Mesh
from models.moe import grouped_gemms
from models.reading import ConfigError
from models.sharding import RULES, VALUES, AnyMesh, abstract_mesh, batch_parts, inside_shard_map
from models.step import Program, program, traceable
from models.text import readable
from models.transformer import flops_per_token


def report(config: Config) -> str:
    """Return the table and the bytes that training needs, on the mesh of the config, on any machine.

    Raises:
      ConfigError: as `summary`.
    """
    traced = fit_to_host_pool(traceable(config), abstract_mesh(config.mesh))
    lines = summary(traced, program(traced, abstract_mesh(traced.mesh)), config.model.attention)
    if traced.model.attention != config.model.attention:
        lines += (
            f"\n(model.attention = {config.model.attention!r} was traced as xla: no CUDA here. On a GPU attn/context "
            "also has the softmax statistics, a float32 for each token and head.)"
        )
    if traced.model.grouped != config.model.grouped:
        lines += f"\n(model.grouped = {config.model.grouped!r} was traced as {traced.model.grouped}: no CUDA here.)"
    return lines


def summary(config: Config, made: Program, attention: str | None = None) -> str:
    """Return what a run prints before it compiles. `attention`: the kind that will run, if another one was traced.

    Raises:
      ConfigError: the policy does not fit the traced step or this machine.
    """
    with _policy_errors():
        table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    kernels = ("attention",) if (attention or config.model.attention) != "xla" else ()
    working = proof.room(made.step, made.state, made.tokens, one_kernel=kernels)
    bytes_lines = memory_lines(config, made, table, working)
    return "\n".join([model_line(config, made), *backend_lines(config), str(table), *bytes_lines])


def fit_to_host_pool(config: Config, mesh: AnyMesh) -> Config:
    """Return the config, offloading fewer layers if all do not fit in the pinned host pool.

    It does so only where `remat.on_host_full` is save. Each scan knows only its own residuals, and a model can have
    two scans; so the number of layers is chosen here.

    Raises:
      ConfigError: as `summary`; or nothing fits.
    """
    if config.remat.on_host_full == "error":
        return config
    strict = replace(config, remat=replace(config.remat, on_host_full="error"))
    made = program(strict, mesh)
    with _policy_errors():
        try:
            jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
        except HostPoolFull as full:
            if full.layers is None:
                raise
            need = f"all together would offload {readable(full.need)} per device"
            less = f"offload_layers = {full.layers} instead of {config.remat.offload_layers}"
            warnings.warn(f"remat: residuals: {need}; {less} (on_host_full: save)", stacklevel=2)
            return replace(config, remat=replace(config.remat, offload_layers=full.layers))
    return config


def check_patterns(config: Config) -> None:
    """Trace the model, at a small batch and on an abstract mesh, and check the policy's patterns against its names.

    Raises:
      ConfigError: a pattern of the policy matches no residual.
    """
    small = traceable(Config(model=config.model, remat=replace(config.remat, on_host_full="error")))
    made = program(small, abstract_mesh(small.mesh))
    with _policy_errors(), contextlib.suppress(HostPoolFull):  # the batch is not the run's, and names are checked first
        jaxoffload.check(small.remat, made.loss, made.state.params, made.microbatch)


@contextlib.contextmanager
def _policy_errors() -> Iterator[None]:
    """Raise the library's errors about the policy as ConfigErrors."""
    try:
        yield
    except PolicyError as error:
        raise ConfigError(problem.under("remat") for problem in error.problems) from error
    except (HostPoolFull, NotImplementedError) as error:
        raise ConfigError([Problem("remat", f"remat: {error}")]) from error
    except GroupedMatmulError as error:
        raise ConfigError([Problem("model.grouped", f"model.grouped: {error}")]) from error
    except UserError as error:  # about the setting of the pinned host pool
        raise ConfigError(error.problems) from error


def model_line(config: Config, made: Program) -> str:
    """Return the size of the model, and its FLOPs."""
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))
    flops = flops_per_token(config.model, config.train.seq_len)
    return f"{count:,} parameters, {flops / 1e9:.3g} GFLOP per token"


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


def memory_lines(config: Config, made: Program, table: Residuals, working: Room) -> list[str]:
    """Return lines of the bytes of each kind, in total and per device; residuals are those of one microbatch.

    The working sets of a layer, and of a chunk of logits with its gradient and the unembedding's, are estimated from
    the traced step. They do not exist at the same time, so the greater one counts. On H200s XLA's plans were from 9 %
    below to 24 % above the expected bytes: only the compiler knows what it keeps twice, and which gaps it leaves.
    """
    mesh = made.tokens.sharding.mesh
    params, moments = made.state.params, made.state.optimizer
    gradients = 1 if config.train.grad_accumulation == 1 else 2  # of a microbatch, and the sum so far
    device, host = (
        sum(device_bytes(row, mesh) for row in table if row.state == state) for state in ("saved", "offloaded")
    )
    rows = [
        ("parameters", _bytes(params), _device_bytes(params)),
        ("gradients", gradients * _bytes(params), gradients * _device_bytes(params)),
        ("optimizer", _bytes(moments), _device_bytes(moments)),
        ("residuals on the device", table.device_bytes, device),
        ("residuals on the host", table.host_bytes, host),
    ]
    on_device = sum(row[2] for row in rows[:4]) + max(working)
    where = "the device" if mesh.size == 1 else f"each of {mesh.size} devices"
    return [
        *(f"{name:24} {readable(total):>12}  {readable(each):>12} per device" for name, total, each in rows),
        f"{'working set of a layer':24} {'':>12}  {readable(working.layer):>12} per device, estimated",
        f"{'or of a chunk of logits':24} {'':>12}  {readable(working.loop):>12} per device, estimated",
        f"expected on {where}: {readable(on_device)}, and {readable(host)} of host memory",
    ]


def device_bytes(row: Residual, mesh: AnyMesh) -> int:
    """Return the bytes of a residual on each device.

    A value computed in `shard_map` has one part per device. A value with a name in VALUES is split by its logical axes;
    any other is split like the batch.
    """
    if row.count > 1:
        return row.bytes // row.count
    # The results of a kernel share a name, with a number each: attn/context.0, and attn/context.1, the statistics.
    names = [name for name in (re.sub(r"\.\d+$", "", name) for name in row.names) if name in VALUES]
    if not names or len(VALUES[names[0]]) != len(row.shape):
        return row.bytes // batch_parts(mesh)
    shard = NamedSharding(mesh, RULES.spec(*VALUES[names[0]])).shard_shape(row.shape)
    return row.bytes * math.prod(shard) // math.prod(row.shape)


def compiled_memory(compiled: jax.stages.Compiled) -> str:
    """Return the memory that the compiled step needs on each device, as XLA plans it."""
    plan = compiled.memory_analysis()
    if plan is None:
        return "this backend does not say how much memory the compiled step needs"
    arguments = plan.argument_size_in_bytes
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    device = arguments + outputs + plan.temp_size_in_bytes
    host = plan.host_argument_size_in_bytes + plan.host_temp_size_in_bytes
    return (
        f"the compiled step needs {readable(device)} on each device (arguments {readable(arguments)}, new outputs "
        f"{readable(outputs)}, temporaries {readable(plan.temp_size_in_bytes)}) and {readable(host)} of host memory"
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _device_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
