"""The processes of a run: how they join, agree and end, and the lock on the run's folder."""

import contextlib
import fcntl
import functools
import os
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxoffload import Problem
from models import signals
from models.config import Config, Distributed, flat
from models.launchers import Place, find_place
from models.peers import Peers
from models.progress import show
from models.reading import ConfigError, as_config_error, config_error, one_line, problem
from models.relay import relay
from models.sharding import MESH_AXES

_NEVER = 10**6  # seconds; models/peers.py replaces JAX's heartbeats, which abort the process from C++

_peers: Peers | None = None


def join(distributed: Distributed, out: Path, steps: Callable[[Path], Sequence[int]]) -> None:
    """Join the other processes, if the config or the launcher (Slurm, Open MPI) says that there are others.

    From then on the processes watch each other (models/peers.py): if another one is lost, this one ends with a line
    that names it and the last checkpoint. Where only JAX can find the others (Open MPI 5, by mpi4py), none watches.

    Args:
      distributed: the section of the config.
      out: the run's folder.
      steps: returns the steps of the checkpoints in `out`.

    Raises:
      ConfigError: the environment variables of the launcher are damaged; or the others cannot be reached, do not
        connect within `distributed.timeout` seconds, or have this process's number.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    place, what = find_place(distributed)
    if place is None and what is None:
        return
    try:
        if place is None:
            jax.distributed.initialize()
        else:
            _meet(place, distributed, functools.partial(_advice, out, steps))
        signals.claim()  # JAX's preemption service has its own handler of SIGTERM
    except ConfigError:
        raise
    except Exception as error:  # JAX's detection of launchers raises many classes, such as KeyError
        why = f"the processes cannot join ({type(error).__name__}: {one_line(error)[:200]})"
        allowed = "must be host:port of process 0, a free port there, with num_processes and process_id"
        raise ConfigError([Problem("distributed", f"{what}: {why}; {allowed}")]) from error


def _meet(place: Place, distributed: Distributed, advice: Callable[[], str]) -> None:
    global _peers
    host, _, number = place.coordinator.rpartition(":")
    host, port = host.strip("[]"), int(number)
    peers = Peers(place.process_id, place.num_processes, distributed.silence, advice)
    if place.process_id == 0:
        with as_config_error(
            "distributed.coordinator", place.coordinator, "a free port here; another process 0 may have it"
        ):
            server = _listening(port, place.num_processes)
        service = peers.accept_others(server, distributed.timeout)
        coordinator = f"127.0.0.1:{service}"
    else:
        service = peers.connect(host, port, distributed.timeout)
        coordinator = f"127.0.0.1:{relay(host, service, peers.abort)}"
    _peers = peers
    signals.before_exit.append(peers.leave)
    peers.watch()
    jax.distributed.initialize(
        coordinator,
        place.num_processes,
        place.process_id,
        coordinator_bind_address=f"[::]:{service}",
        heartbeat_timeout_seconds=_NEVER,
    )


def _listening(port: int, count: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count)
    return socket.create_server(("", port), backlog=count)


def _advice(out: Path, steps: Callable[[Path], Sequence[int]]) -> str:
    """Return what to do when a process is lost, without waiting long for a file system that hangs."""
    found: list[int] = []
    looking = threading.Thread(target=lambda: found.extend(steps(out)), daemon=True)
    looking.start()
    looking.join(timeout=5)
    if looking.is_alive():
        return f"the same command, in every process, continues from the last checkpoint in {out}"
    if not found:
        return f"nothing is saved in {out}; the same command, in every process, starts again"
    return f"the same command, in every process, continues from the checkpoint {out}/checkpoints/{max(found)}"


@contextlib.contextmanager
def announce_exit() -> Iterator[None]:
    """Tell the other processes how this one ends.

    An error is raised only once all others are known to be alive: the loss of another process can cause errors of any
    class here, in Gloo, XLA or orbax.
    """
    try:
        yield
    except BaseException as error:
        if _peers:
            if isinstance(error, Exception):
                _peers.confirm_alive()
            stopped = isinstance(error, signals.Stopped)
            _peers.leave(f"was {error}" if stopped else "ended early; its own output says why")
        raise
    if _peers:
        _peers.finish()


@contextlib.contextmanager
def hard_exit() -> Iterator[None]:
    """End the process at once on an error, if there are others: at exit JAX would wait for them, or abort in C++."""
    try:
        yield
    except BaseException as error:
        if _peers is None or _peers.finished:
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def disagreements(config: Config, problems: Sequence[Problem], last: int | None) -> list[Problem]:
    """Return problems of this run in other processes: their own problems, another config, or another folder.

    Args:
      config: this process's.
      problems: those found in this process; with any, it returns none, since the run cannot start anyway.
      last: the step of the last checkpoint in this process's folder.
    """
    if jax.process_count() == 1:
        return []
    counts = multihost_utils.process_allgather(np.array(len(problems), np.uint32))
    if problems:
        return []
    if counts.any():
        line = f"distributed: process {int(np.flatnonzero(counts)[0])} cannot run; its own output says why"
        return [Problem("distributed", line)]
    # Each process has its own place and cache.
    values = {k: v for k, v in flat(config).items() if not k.startswith("distributed.")}
    why = "differs between the processes; must be the same"
    differ = [problem(key, f"{values[key]!r} here", why) for key in differing_keys(values)]
    if not differ and differing_keys({"step": last}):
        here = "none" if last is None else f"that of step {last}"
        why = f"its last checkpoint is {here} here, and another elsewhere; must be a folder that all processes share"
        return [problem("train.out", repr(config.train.out), why)]
    return differ


def differing_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ between the processes. All processes have the same keys."""
    if jax.process_count() == 1:
        return []
    hashes = np.array([zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32)
    columns = np.atleast_2d(multihost_utils.process_allgather(hashes)).T
    return [key for key, column in zip(values, columns, strict=True) if len(set(column.tolist())) > 1]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a run's folder. The operating system releases it when the process ends, in whatever way.

    Raises:
      ConfigError: another process has it, or the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with as_config_error("train.out", str(folder), "a folder that can be written"):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / ".lock").open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = "another run writes there now; stop it, or give another folder"
                raise config_error("train.out", f"'{folder}'", why) from None
        yield


def global_max(mesh: Mesh, number: int) -> jax.Array:
    """Return the greatest of all processes' numbers, as an array, so that the caller decides when to wait for it."""
    each = NamedSharding(mesh, PartitionSpec(MESH_AXES))
    here = np.full(len(mesh.local_devices), number, np.int32)
    return _max(mesh)(jax.make_array_from_process_local_data(each, here))


@functools.cache
def _max(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


def say(text: str) -> None:
    """Print, in process 0 only."""
    if jax.process_index() == 0:
        show(text)
