"""The processes of a run: how several join, agree and end, and the lock on the run's folder."""

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
from models.reading import ConfigError, as_config_error, config_error, one_line, problem
from models.relay import relay
from models.sharding import MESH_AXES

_FOR_EVER = 10**6  # seconds; JAX's heartbeats, which abort the process from C++, are not needed beside models/peers.py

_peers: Peers | None = None


def join(distributed: Distributed, out: Path, steps: Callable[[Path], Sequence[int]]) -> None:
    """Makes this process one of several, where the config or the launcher (Slurm, Open MPI) says so. `steps(out)`:
    those of the checkpoints.

    They meet first, and are watched from then on (models/peers.py): a process that is lost later ends this one with a
    line that names it and the last checkpoint in `out`. Where JAX alone can tell where they are (Open MPI 5, through
    mpi4py), it joins them unwatched.

    Raises:
      ConfigError: the launcher's environment is damaged, or the others cannot be reached, do not come within
        `distributed.timeout` seconds, or have this process's number.
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
    except Exception as error:  # each launcher's detection in JAX raises what it meets, KeyError and IndexError too
        why = f"the processes cannot join ({type(error).__name__}: {one_line(error)[:200]})"
        allowed = "must be host:port of process 0, a free port there, with num_processes and process_id"
        raise ConfigError([Problem("distributed", f"{what}: {why}; {allowed}")]) from error


def _meet(place: Place, distributed: Distributed, advice: Callable[[], str]) -> None:
    global _peers
    host, _, number = place.coordinator.rpartition(":")
    host, port = host.strip("[]"), int(number)
    peers = Peers(place.index, place.count, distributed.silence, advice)
    if place.index == 0:
        with as_config_error(
            "distributed.coordinator", place.coordinator, "a free port here; another process 0 may have it"
        ):
            server = _listening(port, place.count)
        there = peers.host(server, distributed.timeout)
        coordinator = f"127.0.0.1:{there}"
    else:
        there = peers.visit(host, port, distributed.timeout)
        coordinator = f"127.0.0.1:{relay(host, there, peers.end)}"
    _peers = peers
    signals.before_exit.append(peers.leave)
    peers.watch()
    jax.distributed.initialize(
        coordinator,
        place.count,
        place.index,
        coordinator_bind_address=f"[::]:{there}",
        heartbeat_timeout_seconds=_FOR_EVER,
    )


def _listening(port: int, count: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count)
    return socket.create_server(("", port), backlog=count)


def _advice(out: Path, steps: Callable[[Path], Sequence[int]]) -> str:
    """What to do when a process is lost. Does not wait for a file system that hangs."""
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
    """Tells the others how this process ends. An error waits until it is known that none of them is gone: else it may
    come of that, and be Gloo's, XLA's or orbax's, of any class."""
    try:
        yield
    except BaseException as error:
        if _peers:
            if isinstance(error, Exception):
                _peers.sound()
            words = f"was {error}" if isinstance(error, signals.Stopped) else "ended early; its own output says why"
            _peers.leave(words)
        raise
    if _peers:
        _peers.part()


@contextlib.contextmanager
def hard_exit() -> Iterator[None]:
    """Ends the process, unless the run is over: JAX would wait for the others, and abort from C++ if they are gone."""
    try:
        yield
    except BaseException as error:
        if _peers is None or _peers.parted:
            raise
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def disagreements(config: Config, problems: Sequence[Problem], last: int | None) -> list[Problem]:
    """What the other processes have against this run: problems of their own, another config, or a folder in which the
    last checkpoint is of another step than `last`."""
    if jax.process_count() == 1:
        return []
    counts = multihost_utils.process_allgather(np.array(len(problems), np.uint32))
    if problems:
        return []
    if counts.any():
        line = f"distributed: process {int(np.flatnonzero(counts)[0])} cannot run; its own output says why"
        return [Problem("distributed", line)]
    # Of each process its own: where it is, and where it keeps what it can compute again.
    values = {k: v for k, v in flat(config).items() if not k.startswith("distributed.") and k != "data.cache_dir"}
    why = "differs between the processes; must be the same"
    differ = [problem(key, f"{values[key]!r} here", why) for key in differing_keys(values)]
    if not differ and differing_keys({"step": last}):
        here = "none" if last is None else f"that of step {last}"
        why = f"its last checkpoint is {here} here, and another elsewhere; must be a folder that all processes share"
        return [problem("train.out", repr(config.train.out), why)]
    return differ


def differing_keys(values: Mapping[str, Any]) -> list[str]:
    """The keys, the same in each process, whose values differ between the processes."""
    if jax.process_count() == 1:
        return []
    words = np.array([zlib.crc32(repr(value).encode()) for value in values.values()], np.uint32)
    columns = np.atleast_2d(multihost_utils.process_allgather(words)).T
    return [key for key, column in zip(values, columns, strict=True) if len(set(column.tolist())) > 1]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run's folder. The operating system takes it back when the process ends, however it ends.

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
    """The greatest of all processes' numbers, as an array to read when it is needed."""
    each = NamedSharding(mesh, PartitionSpec(MESH_AXES))
    here = np.full(len(mesh.local_devices), number, np.int32)
    return _max(mesh)(jax.make_array_from_process_local_data(each, here))


@functools.cache
def _max(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))


def say(text: str) -> None:
    if jax.process_index() == 0:
        print(text, flush=True)
