"""Where the processes of a run are: by the config, or by the launcher that started them (Slurm, Open MPI)."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from jaxoffload import Problem
from models.config import Distributed
from models.reading import ConfigError

_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


class Place(NamedTuple):
    """The place of this process among all processes of the run."""

    coordinator: str  # host:port of process 0
    num_processes: int
    process_id: int


def find_place(distributed: Distributed) -> tuple[Place | None, str | None]:
    """Return the place of this process, and the settings that say so, for messages.

    Both are None if the process is alone. The place alone is None if only JAX can find it (Open MPI 5, by mpi4py).

    Raises:
      ConfigError: the environment variables of the launcher are damaged.
    """
    if distributed.coordinator is not None:
        place = Place(distributed.coordinator, distributed.num_processes, distributed.process_id)
        return place, f"distributed.coordinator = {distributed.coordinator!r}"
    tasks = {name: os.environ[name] for name in _COUNTS if name in os.environ}
    for name, count in tasks.items():
        if not count.isdecimal():
            line = f"distributed: the environment's {name} = {count!r}: must be a number of processes"
            raise ConfigError([Problem("distributed", line)])
    if all(int(count) < 2 for count in tasks.values()):
        return None, None
    return _launched(os.environ), f"distributed.coordinator = None, and {tasks}"


def _launched(environ: Mapping[str, str]) -> Place | None:
    """Return host and port as JAX chooses them (jax/_src/clusters). Under mpirun in a Slurm job Open MPI decides."""
    try:
        if "OMPI_COMM_WORLD_SIZE" in environ:
            names = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
            # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::b9b,2620:10d::2]:43370
            job, host = re.match(
                r"(\d+)\..*?tcp6?://\[?([^,\]]+?)(?:[,\]]|:\d+$)", environ["OMPI_MCA_orte_hnp_uri"]
            ).groups()
            number = int(job) >> 12
        else:
            names = "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"
            # node001, or node001,host2, or node[001-0015],host2, or node[001,007-015],host2
            host = "".join(re.match(r"([^\[,]+)(?:\[(\w+))?", environ["SLURM_STEP_NODELIST"]).groups(""))
            number = int(environ["SLURM_JOB_ID"])
        address = environ.get(
            "JAX_COORDINATOR_ADDRESS", f"{host}:{environ.get('JAX_COORDINATOR_PORT', 61440 + number % 4096)}"
        )
        return Place(address, *(int(environ[name]) for name in names))
    except (KeyError, ValueError, AttributeError):  # variables are missing or damaged
        return None
