"""What a config needs, from abstract values: the residual table, and the bytes of state and residuals."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend.core import jaxpr_as_fun

import jaxoffload
from jaxoffload import HostPoolFull, Plan, PolicyError, Problem, Residual, Residuals, Schedule, UserError, proof
from jaxoffload.grouped import GroupedMatmulError
from models.config import Config
from models.planning import planned
from models.reading import ConfigError, config_error
from models.sharding import AnyMesh, abstract_mesh, on_mesh
from models.step import Program, Step, derivative_of, may_interleave, program, traceable
from models.text import readable


class Memory(NamedTuple):
    """The bytes of each kind: (in total, per device)."""

    parameters: tuple[int, int]
    gradients: tuple[int, int]
    optimizer: tuple[int, int]
    on_device: tuple[int, int]  # residuals
    on_host: tuple[int, int]


class Weighed(NamedTuple):
    """What a program keeps and needs."""

    table: Residuals
    memory: Memory
    step: Step  # traced without the model, except on stages


def traced_program(config: Config) -> tuple[Config, Program, Plan | None]:
    """Return the config as this machine can trace it, with the policy that is planned, if one is, and with fewer layers
    that offload if they have to fit; its program on the mesh of the config; and the plan."""
    mesh = abstract_mesh(config.mesh)
    traced, plan = planned(traceable(config), mesh)
    traced = fit_to_host_pool(traced, mesh)
    return traced, program(traced, mesh), plan


def weighed(config: Config, made: Program) -> Weighed:
    """Return the table of one microbatch, and the bytes that a step needs.

    Raises:
      ConfigError: as `summary`.
    """
    with _policy_errors(config):
        alone = traced_once(without_stages(config, made))
        table = judged_residuals(config, alone)
    # On stages a step traces the layers as a stage runs them.
    step = made.step if config.mesh.stage > 1 else alone.step_of(alone.training, derivative_of(config))
    return Weighed(table, memory(config, made, table), step)


def traced_once(made: Program) -> Program:
    """Return the program, whose `loss` and `training` evaluate one trace of the model, that of their first call."""

    @functools.cache  # not traced here: jaxoffload, which calls it first, sets what kind of jax.checkpoint it is
    def trace() -> tuple[Callable[..., Any], Any]:
        jaxpr, out = jax.make_jaxpr(made.training, return_shape=True)(made.state.params, made.microbatch)
        return jaxpr_as_fun(jaxpr), jax.tree.structure(out)

    @functools.partial(on_mesh, made.tokens.sharding.mesh)
    def training(*args: Any) -> Any:
        evaluate, result = trace()
        return result.unflatten(evaluate(*jax.tree.leaves(args)))

    return made._replace(training=training, loss=lambda *args: training(*args)[0])


def judged_residuals(config: Config, alone: Program) -> Residuals:
    """Return the table of one microbatch. `alone`: the program without stages, traced once.

    Raises:
      ConfigError: `train.interleave` is true, and nothing is offloaded.
      HostPoolFull: the pinned host pool cannot hold the stacks, which are those of two microbatches if they interleave.
      PolicyError, NotImplementedError, GroupedMatmulError: as `jaxoffload.residuals`.
    """
    arguments = alone.state.params, alone.microbatch
    if (
        may_interleave(config.train) and config.mesh.stage == 1
    ):  # `accumulate` refuses them too, but cannot say how many layers would fit
        jaxoffload.residuals(lambda *args: alone.loss(*args) + alone.loss(*args), *arguments)
    table = jaxoffload.residuals(alone.loss, *arguments)
    if config.train.interleave is True and not table.host_bytes:
        raise config_error("train.interleave", True, "must be auto or false where remat offloads nothing")
    return table


def interleaves(config: Config, table: Residuals) -> bool:
    """Return whether microbatches interleave: `accumulate` does so where something is offloaded, and on stages."""
    return config.mesh.stage > 1 or (may_interleave(config.train) and table.host_bytes > 0)


def prediction(made: Program, found: Weighed) -> proof.Prediction | None:
    """Return what is predicted of a step; None on GPUs that `proof.machine` has not measured."""
    known = proof.known_machine()
    return proof.predict(found.step, made.state, made.tokens, machine=known) if known else None


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
    with _policy_errors(config):
        try:
            judged_residuals(strict, traced_once(without_stages(strict, made)))
        except HostPoolFull as full:
            if full.layers is None:
                raise
            whose = "two microbatches" if may_interleave(config.train) else "all together"
            need = f"{whose} would offload {readable(full.need)} per device"
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
    # The batch is not the run's, and names are checked first.
    with _policy_errors(config), contextlib.suppress(HostPoolFull):
        jaxoffload.check(made.loss, made.state.params, made.microbatch, policy=small.remat)


@contextlib.contextmanager
def _policy_errors(config: Config) -> Iterator[None]:
    """Raise the library's errors about the policy as ConfigErrors."""
    try:
        yield
    except PolicyError as error:
        raise ConfigError(problem.under("remat") for problem in error.problems) from error
    except HostPoolFull as error:
        less = "; these are two microbatches: train.interleave=false needs half" if may_interleave(config.train) else ""
        raise ConfigError([Problem("remat", f"remat: {error}{less}")]) from error
    except NotImplementedError as error:
        raise ConfigError([Problem("remat", f"remat: {error}")]) from error
    except GroupedMatmulError as error:
        raise ConfigError([Problem("model.grouped", f"model.grouped: {error}")]) from error
    except UserError as error:  # about the setting of the pinned host pool
        raise ConfigError(error.problems) from error


def parameter_count(made: Program) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made.state.params))


def without_stages(config: Config, made: Program) -> Program:
    """Return the program of a config on one stage's devices, as if they ran all layers.

    As many of them offload as on stages, where no layer is resident.
    """
    if config.mesh.stage == 1:
        return made
    offloads = offloads_of_a_chunk(config) * schedule_of(config).chunks
    remat = replace(config.remat, resident_layers=0, offload_layers=offloads)
    mesh, train = replace(config.mesh, stage=1), replace(config.train, virtual_stages=1)
    return program(replace(config, remat=remat, mesh=mesh, train=train), abstract_mesh(mesh))


def schedule_of(config: Config) -> Schedule:
    return Schedule(config.mesh.stage, config.train.virtual_stages, config.train.grad_accumulation)


def layers_of_a_chunk(config: Config) -> int:
    return (config.model.layers - config.model.dense_layers) // schedule_of(config).chunks


def offloads_of_a_chunk(config: Config) -> int:
    """Return how many layers of each chunk offload; no layer is resident."""
    chunks = schedule_of(config).chunks
    return replace(config.remat, resident_layers=0).offloaded_layers(layers_of_a_chunk(config) * chunks) // chunks


class Stage(NamedTuple):
    """What a pipeline stage runs, and the bytes on each of its devices."""

    layers: list[str]  # such as "0-3", for each of its chunks
    in_flight: int  # the most microbatches between their forward and their backward pass
    host: int
    device: int
    each_way: int  # copied to the host in a step, and back


def stages(config: Config, made: Program, table: Residuals) -> list[Stage]:
    """Return what each stage runs and keeps.

    All stages have as much room on the host: a ring of as many slots as the first one needs.
    """
    schedule, layers = schedule_of(config), layers_of_a_chunk(config)

    def of_chunk(state: str, padding: int = 0) -> int:
        return sum(row.bytes_per_device for row in of_a_chunk(config, table, state, padding))

    copied = schedule.microbatches * schedule.virtual_stages * of_chunk("offloaded", padding=1)
    numbers = lambda chunk: f"{chunk * layers}-{(chunk + 1) * layers - 1}"
    return [
        Stage(
            [*map(numbers, range(stage, schedule.chunks, schedule.stages))],
            flight := schedule.in_flight(stage),
            flight * of_chunk("offloaded"),
            flight * of_chunk("saved"),
            copied,
        )
        for stage in range(schedule.stages)
    ]


def of_a_chunk(config: Config, table: Residuals, state: str, padding: int = 0) -> list[Residual]:
    """Return what a chunk keeps of a microbatch, "saved" or "offloaded", with so many rows of padding on the host.

    Dense layers before those with experts belong to no chunk.
    """
    layers, offloads = layers_of_a_chunk(config), offloads_of_a_chunk(config)
    times = {"saved": layers, "offloaded": offloads + padding if offloads else 0}
    rows = [row for row in table if row.layers > config.model.dense_layers and (row.names or row.layers > 1)]
    kept = [(row, times[state]) for row in rows if row.state == state and row.reason != "other_layers"]
    if state == "saved" and config.remat.other_layers == "save":
        # The table has a line for layers that offload, and others for those that do not; one of them is enough.
        of_moved = [row for row in rows if row.state == "offloaded"]
        others = [row for row in rows if row.reason == "other_layers"]
        kept += [(row, layers - offloads) for row in of_moved or others]
    return [replace(row, state=state, bytes=row.bytes_per_layer * count) for row, count in kept]


def memory(config: Config, made: Program, table: Residuals) -> Memory:
    """Return the bytes that a step needs."""
    residuals = residuals_at_once(config, table)
    state = made.state.params, gradients_at_once(config, made, table), made.state.optimizer

    def kept(state: str) -> tuple[int, int]:
        rows = [row for row in residuals if row.state == state]
        return config.mesh.stage * sum(row.bytes for row in rows), sum(row.bytes_per_device for row in rows)

    sizes = [(_bytes(tree), _device_bytes(tree)) for tree in state]
    return Memory(*sizes, kept("saved"), kept("offloaded"))


def residuals_at_once(config: Config, table: Residuals) -> list[Residual]:
    """Return the lines of all residuals that exist at once: those of layers twice if microbatches interleave."""
    if config.mesh.stage > 1:
        in_slots = [*of_a_chunk(config, table, "saved"), *of_a_chunk(config, table, "offloaded", padding=1)]
        return [replace(row, bytes=row.bytes * schedule_of(config).slots) for row in in_slots]
    of_layers = [row for row in table if row.names or row.layers > 1]
    return [*table, *of_layers] if interleaves(config, table) else [*table]


def gradients_at_once(config: Config, made: Program, table: Residuals) -> list[Any]:
    """Return the abstract gradients that exist at once: their sum so far, and those of one microbatch.

    Interleaved backward passes add those of stacked layers to the sum, layer by layer.
    """
    params = made.state.params
    if config.train.grad_accumulation == 1 and config.mesh.stage == 1:
        return [params]
    if not interleaves(config, table):
        return [params, params]
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Param))
    return [params, [param for param in leaves if len(param.shape) == len(param.axes)]]


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _device_bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
