"""Checks that a config can run here: all problems are found before anything is compiled or tokenised."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxoffload import Problem
from jaxoffload.grouped import GroupedMatmulError, grouped_matmul, te
from models import checkpoints, metrics, tensorboard
from models.config import Config, Model
from models.needs import check_patterns
from models.processes import announce_exit, disagreements, join, locked
from models.reading import ConfigError, collecting, config_error, has_problem, problem
from models.report import grouped_gemms, inside_shard_map
from models.sharding import make_mesh

# What the import of TransformerEngine raises, by what it misses.
_NO_TE = (ImportError, OSError, RuntimeError, AttributeError)

# The keys that `_check_grouped` reads.
_GROUPED_KEYS = (
    *("model.experts", "model.experts_per_token", "model.d_model", "model.d_expert", "model.dtype", "model.grouped"),
    *("model.quantize", "model.exchange", "model.capacity", "mesh"),
    *("train.batch_size", "train.grad_accumulation", "train.seq_len"),
)


@contextlib.contextmanager
def checked_run(config: Config, problems: list[Problem]) -> Iterator[Mesh]:
    """Join the other processes, check the config in all of them, lock the run's folder, and yield the run's mesh.

    Args:
      config: the run's.
      problems: those of the file and overrides; all others are added. A check that reads a key with a problem is left
        out, because the config has the default there.

    Raises:
      ConfigError: it lists all problems.
    """
    with contextlib.ExitStack() as stack:
        if not has_problem(problems, "distributed"):
            with collecting(problems):  # first: no process can join after JAX's backend has started
                join(config.distributed, Path(config.train.out), checkpoints.steps)
        stack.enter_context(announce_exit())
        if _may_use_te(config.model):
            with contextlib.suppress(*_NO_TE):  # before JAX's first computation loads another cuDNN
                importlib.import_module("transformer_engine.jax")
        check_names(config, problems)
        mesh = _checked_mesh(config, problems)
        last = _checked_folder(config, problems)
        if not problems and jax.process_index() == 0:
            with collecting(problems):
                stack.enter_context(locked(Path(config.train.out)))
        problems += disagreements(config, problems, last)
        if problems:
            raise ConfigError(problems)
        assert mesh is not None
        yield mesh


def _checked_mesh(config: Config, problems: list[Problem]) -> Mesh | None:
    """Return the mesh if the devices can form it. Add what kernels and profiler cannot do on these devices."""
    mesh = None
    if not has_problem(problems, "distributed", "mesh"):
        with collecting(problems):
            mesh = make_mesh(config.mesh)
    with collecting(problems):
        _check_attention(config)
    with collecting(problems):
        _check_profile(config)
    with collecting(problems):
        tensorboard.check(config)
    if not has_problem(problems, *_GROUPED_KEYS):
        with collecting(problems):
            _check_grouped(config)
    return mesh


def _checked_folder(config: Config, problems: list[Problem]) -> int | None:
    """Return the step of the last checkpoint, None if there is none. Add why the run cannot continue from it."""
    if has_problem(problems, "train.out"):
        return None
    with collecting(problems):
        saved = checkpoints.latest(Path(config.train.out), config.train.on_bad_checkpoint)
        differences = checkpoints.differences(config, saved) if saved else []
        problems += [problem for problem in differences if not has_problem(problems, problem.key)]
        metrics.read(Path(config.train.out) / "metrics.jsonl")
        return saved.step if saved else None
    return None


def check_names(config: Config, problems: list[Problem]) -> None:
    """Add a problem for each pattern of the policy that matches no residual, if the model can be traced."""
    if jax.config.jax_disable_jit:
        problems.append(problem("JAX_DISABLE_JIT", True, "only compiled programs offload residuals; must be unset"))
    elif not has_problem(problems, "model", "remat"):
        with collecting(problems):
            check_patterns(config)


def _may_use_te(model: Model) -> bool:
    """Return whether the model may use TransformerEngine; for `auto` that depends on the GPU, not yet known."""
    return "te" in (model.attention, model.grouped) or (model.experts > 0 and model.grouped == "auto")


def _check_attention(config: Config) -> None:
    kind, backend = config.model.attention, jax.default_backend()
    if kind == "xla":
        return
    if backend != "gpu":
        raise config_error(
            "model.attention", repr(kind), f"needs NVIDIA GPUs, and this is a {backend}; must be xla here"
        )
    if kind == "te":
        advice = "install it as docs/experts.md says, or use cudnn"
        if why_not := te.too_old():
            raise config_error("model.attention", "'te'", f"{why_not}: {advice}")
        try:
            importlib.import_module("transformer_engine.jax.attention")
        except _NO_TE as error:
            why = f"TransformerEngine cannot be imported ({str(error).partition(chr(10))[0]})"
            raise config_error("model.attention", "'te'", f"{why}; {advice}") from error


def _check_profile(config: Config) -> None:
    if (steps := config.train.profile_steps) and (backend := jax.default_backend()) != "gpu":
        why = f"needs NVIDIA GPUs, and this is a {backend}; must be null here"
        raise config_error("train.profile_steps", list(steps), why)


def _check_grouped(config: Config) -> None:
    """Raise ConfigError if `model.grouped` or `model.exchange` cannot run the experts here."""
    model, mesh = config.model, config.mesh
    if not model.experts:
        return
    problems = []
    if model.exchange == "ragged" and mesh.expert > 1 and jax.default_backend() != "gpu":
        problems.append(
            problem("model.exchange", "'ragged'", "XLA supports it on NVIDIA GPUs only; must be padded here")
        )
    gemm = functools.partial(grouped_matmul, backend=model.grouped, quantize=model.quantize)
    try:
        with inside_shard_map(mesh):
            for x, w in grouped_gemms(config):
                jax.eval_shape(gemm, x, w, jax.ShapeDtypeStruct(w.shape[:1], jnp.int32))
    except GroupedMatmulError as error:
        problems.append(problem("model.grouped", repr(model.grouped), str(error)))
    if problems:
        raise ConfigError(problems)
