"""Whether a config can run here: all that is wrong with it at once, before anything is compiled or tokenised."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh

from models import checkpoints
from models.config import Config
from models.processes import join, locked, objections
from models.reading import ConfigError, collecting
from models.report import check_patterns
from models.sharding import make_mesh


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
                join(config.distributed)
        check_names(config, problems)
        if not blames("distributed", "mesh"):
            with collecting(problems):
                mesh = make_mesh(config.mesh)
        with collecting(problems):
            _check_attention(config)
        if not blames("train.out"):
            with collecting(problems):
                saved = checkpoints.latest(Path(config.train.out))
                found = checkpoints.differences(config, saved) if saved else {}
                problems += [line for key, line in found.items() if not blames(f"{key} =", f"{key.split('.')[0]} =")]
        if not problems and jax.process_index() == 0:
            with collecting(problems):
                stack.enter_context(locked(Path(config.train.out)))
        if problems := [*problems, *objections(config, problems)]:
            raise ConfigError(problems)
        yield mesh


def check_names(config: Config, problems: list[str]) -> None:
    """Adds to the problems the policy's patterns that match no residual, if the model can be traced."""
    if not any(line.startswith(("model", "remat")) for line in problems):
        with collecting(problems):
            check_patterns(config)


def _check_attention(config: Config) -> None:
    backend = jax.default_backend()
    if config.model.attention == "cudnn" and backend != "gpu":
        raise ConfigError([f"model.attention = 'cudnn': needs NVIDIA GPUs, and this is a {backend}; must be xla here"])
