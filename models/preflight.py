"""Whether a config can run here: all that is wrong with it at once, before anything is compiled or tokenised."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxoffload import grouped_matmul
from jaxoffload.grouped import te
from models import checkpoints, metrics
from models.config import Config, Model
from models.moe import products
from models.processes import accompanied, join, locked, objections
from models.reading import ConfigError, collecting
from models.report import check_patterns
from models.sharding import inside_shard_map, make_mesh

_NO_TE = (ImportError, OSError, RuntimeError, AttributeError)  # by what TransformerEngine misses

# What `_check_products` reads.
_OF_PRODUCTS = (
    *(
        f"model.{key}"
        for key in ("experts", "d_model", "d_expert", "dtype", "grouped", "quantize", "exchange", "capacity")
    ),
    *("mesh", "train.batch_size", "train.grad_accumulation", "train.seq_len"),
)


@contextlib.contextmanager
def admitted(config: Config, problems: list[str]) -> Iterator[Mesh]:
    """The mesh of a run that no process has anything against; the run's folder is locked meanwhile.

    `problems` are those of the file. Where they blame what a check reads, it is not made: the config holds a default.

    Raises:
      ConfigError: all problems at once.
    """
    blames = lambda *keys: any(line.startswith(keys) for line in problems)
    with contextlib.ExitStack() as stack:
        if not blames("distributed"):
            with collecting(problems):  # before the others: they start JAX's backend, and then none can join
                join(config.distributed, Path(config.train.out), checkpoints.steps)
        stack.enter_context(accompanied())
        if _may_use_te(config.model):
            with contextlib.suppress(*_NO_TE):  # before JAX's first computation, which loads another cuDNN
                importlib.import_module("transformer_engine.jax")
        check_names(config, problems)
        if not blames("distributed", "mesh"):
            with collecting(problems):
                mesh = make_mesh(config.mesh)
        with collecting(problems):
            _check_attention(config)
        with collecting(problems):
            _check_profile(config)
        if not blames(*_OF_PRODUCTS):
            with collecting(problems):
                _check_products(config)
        saved = None
        if not blames("train.out"):
            with collecting(problems):
                saved = checkpoints.latest(Path(config.train.out), config.train.on_bad_checkpoint)
                found = checkpoints.differences(config, saved) if saved else {}
                problems += [line for key, line in found.items() if not blames(f"{key} =", f"{key.split('.')[0]} =")]
                metrics.read(Path(config.train.out) / "metrics.jsonl")
        if not problems and jax.process_index() == 0:
            with collecting(problems):
                stack.enter_context(locked(Path(config.train.out)))
        if problems := [*problems, *objections(config, problems, saved.step if saved else None)]:
            raise ConfigError(problems)
        yield mesh


def check_names(config: Config, problems: list[str]) -> None:
    """Adds to the problems the policy's patterns that match no residual, if the model can be traced."""
    if jax.config.jax_disable_jit:
        problems.append("JAX_DISABLE_JIT = True: residuals are offloaded in compiled programs alone; must be unset")
    elif not any(line.startswith(("model", "remat")) for line in problems):
        with collecting(problems):
            check_patterns(config)


def _may_use_te(model: Model) -> bool:
    """Whether somebody asks for TransformerEngine, or `auto` may take it: by the GPU, which only JAX can tell."""
    return "te" in (model.attention, model.grouped) or (model.experts > 0 and model.grouped == "auto")


def _check_attention(config: Config) -> None:
    kind, backend = config.model.attention, jax.default_backend()
    if kind == "xla":
        return
    if backend != "gpu":
        raise ConfigError([f"model.attention = {kind!r}: needs NVIDIA GPUs, and this is a {backend}; must be xla here"])
    if kind == "te":
        if why_not := te.too_old():
            raise ConfigError([f"model.attention = 'te': {why_not}: install it as docs/experts.md says, or use cudnn"])
        try:
            importlib.import_module("transformer_engine.jax.attention")
        except _NO_TE as why:
            said = str(why).partition("\n")[0]
            raise ConfigError(
                [
                    f"model.attention = 'te': TransformerEngine cannot be imported ({said}); "
                    "install it as docs/experts.md says, or use cudnn"
                ]
            ) from why


def _check_profile(config: Config) -> None:
    if (steps := config.train.profile_steps) and (backend := jax.default_backend()) != "gpu":
        raise ConfigError(
            [f"train.profile_steps = {list(steps)}: needs NVIDIA GPUs, and this is a {backend}; must be null here"]
        )


def _check_products(config: Config) -> None:
    """Whether `model.grouped` can do the experts' products."""
    model, mesh = config.model, config.mesh
    if not model.experts:
        return
    problems = []
    if model.exchange == "ragged" and mesh.expert > 1 and jax.default_backend() != "gpu":
        problems.append("model.exchange = 'ragged': XLA has it on NVIDIA GPUs alone; must be padded here")
    product = functools.partial(grouped_matmul, backend=model.grouped, quantize=model.quantize)
    try:
        with inside_shard_map(mesh):
            for x, w in products(config):
                jax.eval_shape(product, x, w, jax.ShapeDtypeStruct(w.shape[:1], jnp.int32))
    except (ValueError, ImportError) as why:
        problems.append(f"model.grouped = {model.grouped!r}: {why}")
    if problems:
        raise ConfigError(problems)
