"""The processes of a run: how several join and agree, what a signal does, and the lock on the run's folder."""

import contextlib
import fcntl
import functools
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.config import Config, Distributed, flat
from models.reading import ConfigError, blaming, one_line
from models.sharding import MESH_AXES

_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def join(distributed: Distributed) -> None:
    """Makes this process one of several, where the config or the launcher (Slurm, Open MPI) says so.

    Raises:
      ConfigError: the launcher's environment is damaged, or the others cannot be reached.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    tasks = {name: os.environ[name] for name in _LAUNCHERS if name in os.environ}
    if distributed.coordinator is not None:
        explicit = (distributed.coordinator, distributed.num_processes, distributed.process_id)
        what = f"distributed.coordinator = {distributed.coordinator!r}"
    else:
        explicit, what = (), f"distributed.coordinator = None, and {tasks}"
        for name, count in tasks.items():
            if not count.isdecimal():
                raise ConfigError([f"distributed: the environment's {name} = {count!r}: must be a number of processes"])
        if all(int(count) < 2 for count in tasks.values()):
            return
    try:
        jax.distributed.initialize(*explicit)
    except Exception as error:  # each launcher's detection in JAX raises what it meets, KeyError and IndexError too
        raise ConfigError(
            [
                f"{what}: the processes cannot join ({type(error).__name__}: {one_line(error)[:200]}); must be "
                "host:port of process 0, a free port there, with num_processes and process_id"
            ]
        ) from error


def objections(config: Config, problems: Sequence[str]) -> list[str]:
    """What the other processes have against this run: problems of their own, or another config."""
    if jax.process_count() == 1:
        return []
    # Of each process its own: where it is, and where it keeps what it can compute again.
    values = {k: v for k, v in flat(config).items() if not k.startswith("distributed.") and k != "data.cache_dir"}
    words = [len(problems), *(zlib.crc32(repr(value).encode()) for value in values.values())]
    counts, *columns = np.asarray(multihost_utils.process_allgather(np.array(words, np.uint32))).T
    if problems:
        return []
    if counts.any():
        return [f"distributed: process {int(np.flatnonzero(counts)[0])} cannot run; its own output says why"]
    differ = [key for key, column in zip(values, columns, strict=True) if len(set(column.tolist())) > 1]
    return [f"{key} = {values[key]!r} here: differs between the processes; must be the same" for key in differ]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run's folder. The operating system takes it back when the process ends, however it ends.

    Raises:
      ConfigError: another process has it, or the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with blaming("train.out", str(folder), "a folder that can be written"):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    [f"train.out = '{folder}': another run writes there now; stop it, or give another folder"]
                ) from None
        yield


def greatest(mesh: Mesh, number: int) -> jax.Array:
    """The greatest of all processes' numbers, as an array to read when it is needed."""
    each = NamedSharding(mesh, PartitionSpec(MESH_AXES))
    here = np.full(len(mesh.local_devices), number, np.int32)
    return _max(mesh)(jax.make_array_from_process_local_data(each, here))


@functools.cache
def _max(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def noted_signals() -> Iterator[Callable[[], int]]:
    """Yields a function that says which of SIGINT and SIGTERM came, or 0; a second one acts as usual."""
    received = [0]

    def note(number: int, frame: Any) -> None:
        received[0] = number
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0]
    finally:
        restore()


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Ctrl-C is a KeyboardInterrupt, also where it meets one of JAX's caches while that compares keys: what is raised
    there comes out as a ValueError. What is raised in a callback of Python's would be printed by Python, and lost:
    yields a function that raises it again, instead."""
    came, unraisable = False, sys.unraisablehook

    def note(number: int, frame: Any) -> None:
        nonlocal came
        came = True
        signal.default_int_handler(number, frame)

    def raise_again() -> None:
        if came:
            raise KeyboardInterrupt

    def lost(what: "sys.UnraisableHookArgs") -> None:
        if not (came and what.exc_type is KeyboardInterrupt):
            unraisable(what)

    sys.unraisablehook = lost
    before = signal.signal(signal.SIGINT, note)
    try:
        yield raise_again
    except ValueError as error:
        if came:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = unraisable
        signal.signal(signal.SIGINT, before)
