"""Processes that are lost, late, alike or different, and signals at any time: each ends with a line and an exit
status."""

import contextlib
import itertools
import os
import random
import re
import signal
import socket
import sys
import threading
import time
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest
from common import PATIENCE, ROOT, inherited_flags, start, wait_for
from jax.experimental import multihost_utils

from models import peers, processes
from models.config import Config, Distributed
from models.launchers import Place, find_place
from models.peers import Peers
from models.reading import ConfigError

pytestmark = pytest.mark.slow

CONFIG = """\
model: {vocab_size: 300, layers: 1, d_model: 32, heads: 2, kv_heads: 2, d_ff: 32, dtype: float32}
data: {path: texts/*.txt, valid_fraction: 0.2, cache_dir: cache}
train:
  {steps: 1000000, batch_size: 12, seq_len: 32, loss_chunk: 16, log_every: 100000, eval_every: 1000000,
    eval_batches: 1, checkpoint_every: 20, out: out}
"""


class Running:
    """One process of the training program, and its output."""

    def __init__(self, folder: Path, *arguments: str):
        self.out, self.err = (folder / f"{name}-{time.monotonic_ns()}" for name in ("stdout", "stderr"))
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": inherited_flags(), "PYTHONPATH": str(ROOT)}
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = start(arguments, cwd=folder, env=environment, stdout=out, stderr=err)

    def until(self, happened: Callable[[], bool]) -> None:
        wait_for(self.process, happened)

    def ended(self, status: int) -> list[str]:
        """The lines on stderr."""
        assert self.process.wait(PATIENCE) == status, self.err.read_text()
        return self.err.read_text().splitlines()

    def listens(self) -> bool:
        """Whether it has installed its own SIGTERM handler."""
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{self.process.pid}/status").read_text())
        return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@contextlib.contextmanager
def running(*each: tuple[Path, list[str]]) -> Iterator[list[Running]]:
    """Starts processes, each with its working directory and Python's arguments; none outlives the test."""
    started: list[Running] = []
    try:
        for folder, arguments in each:
            started.append(Running(folder, sys.executable, *arguments))
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


TRAIN = ["-m", "models.train"]
# The same, but once the file `hurry` exists, the clock by which the processes watch each other is 200 times as fast.
# A process waits a second for what arrives. If half of `distributed.silence` passed meanwhile, it would conclude that
# it had been stopped itself.
HURRYING = """
import pathlib, runpy, time, types
from models import peers
since = None
def monotonic():
    global since
    now = time.monotonic()
    if since is None and pathlib.Path("hurry").exists():
        since = now
    return now + 200 * (now - (since or now))
peers.time = types.SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
runpy.run_module("models.train", run_name="__main__", alter_sys=True)
"""


def together(folders: list[Path], *overrides: str, program: Sequence[str] = TRAIN):
    """Start the processes of one run, with one device each."""
    count, coordinator = len(folders), f"distributed.coordinator=localhost:{free_port()}"
    command = [*program, str(folders[0] / "test.yaml"), coordinator, f"distributed.num_processes={count}"]
    command += [f"mesh.data={count}", f"train.out={folders[0]}/out", *overrides]
    return running(*((folder, [*command, f"distributed.process_id={i}"]) for i, folder in enumerate(folders)))


def written(folder: Path) -> Path:
    """Write a config in a folder, beside texts."""
    order = random.Random(0)
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / f"texts/{number}.txt").write_text(" ".join("".join(order.choices("abcdef", k=5)) for _ in range(99)))
    (folder / "test.yaml").write_text(CONFIG)
    return folder


# ---- one that is lost ----

ON_STAGES = ["mesh.data=1", "mesh.stage=2", "model.layers=4", "train.virtual_stages=2", "train.grad_accumulation=2"]


@pytest.mark.claim("lost-processes")
@pytest.mark.parametrize("lost, overrides", [(0, []), (1, []), (1, ON_STAGES)], ids=["0", "1", "a stage"])
def test_where_a_process_is_killed_the_others_say_so_and_name_the_checkpoint(tmp_path, lost, overrides):
    """Process 0 runs JAX's coordination service; when it dies, its clients abort from C++."""
    with together([written(tmp_path)] * 2, *overrides) as both:
        both[0].until((tmp_path / "out/checkpoints/20").exists)
        both[lost].process.kill()
        (line,) = both[1 - lost].ended(5)
    assert re.match(rf"process {lost} \(.+\) is gone: it was killed, or crashed; the same command, ", line)
    assert re.search(r"continues from the checkpoint .*/out/checkpoints/\d+$", line)


def test_a_process_that_is_killed_ends_two_others_though_they_compile(tmp_path):
    with together([written(tmp_path)] * 3) as all_:
        all_[0].until(lambda: "held out" in all_[0].out.read_text())
        all_[2].process.kill()
        lines = [one.ended(5) for one in all_[:2]]
    assert lines[0] == lines[1] and len(lines[0]) == 1
    assert re.match(
        r"process 2 \(.+, pid \d+\) is gone: .*; nothing is saved in .*/out; the same command, ", lines[0][0]
    )


@pytest.mark.claim("lost-processes")
def test_a_process_that_is_stopped_is_not_waited_for(tmp_path):
    """After half an hour, so that no other process seems to be stopped on a busy machine; the clock is then hurried."""
    silence = f"distributed.silence={PATIENCE}"
    with together([written(tmp_path)] * 2, silence, program=["-c", HURRYING]) as both:
        both[0].until(lambda: "held out" in both[0].out.read_text())
        both[1].process.send_signal(signal.SIGSTOP)
        (tmp_path / "hurry").touch()
        (line,) = both[0].ended(5)
    assert re.match(
        r"process 1 \(.+\) has been silent for 1800 s \(distributed.silence\): it hangs or is stopped", line
    )


def test_a_signal_to_one_process_that_compiles_ends_it_and_then_the_others(tmp_path):
    """JAX's preemption service installs a SIGTERM handler that ends nothing."""
    with together([written(tmp_path)] * 2) as both:
        both[0].until(lambda: "held out" in both[0].out.read_text())
        both[1].process.terminate()
        assert both[1].ended(128 + signal.SIGTERM) == [STOPPED.format("SIGTERM")]
        (line,) = both[0].ended(5)
    assert re.match(r"process 1 \(.+\) was stopped by SIGTERM; nothing is saved in ", line)


# ---- one that differs ----


def test_different_text_under_one_path_is_not_trained_on(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        written(folder)
    (folders[1] / "texts/3.txt").write_text("other words")
    said = "data.path = 'texts/*.txt' here: has other bytes in another process; must be the same files"
    with together(folders) as both:
        for one in both:
            assert one.ended(2)[1:] == [said]


def test_a_folder_that_the_processes_do_not_share_is_not_trained_in(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    there = np.array([zlib.crc32(b"20")], np.uint32)  # the other process's last step; the rest is the same

    def gathered(words):
        return np.stack([words, there if words.shape == (1,) else words])

    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    assert processes.disagreements(Config(), [], 20) == []
    said = "its last checkpoint is that of step 40 here, and another elsewhere; must be a folder that all processes sh"
    ((_, line),) = processes.disagreements(Config(), [], 40)
    assert said in line


# ---- one that never arrives, or arrives twice: `Peers`, in threads ----


def meeting(*visitors: tuple[int, int]) -> list[int | str]:
    """Return what process 0 of three, and the visitors (index, count), each end with: the port, or an error. The first
    visitor arrives before the others, the last after they have left."""
    found: dict[int, int | str] = {}
    server = socket.create_server(("localhost", 0))
    port = server.getsockname()[1]
    all_ = [Peers(i, n, 60.0, str) for i, n in [(0, 3), *visitors]]

    def meet(k: int) -> None:
        try:
            found[k] = all_[k].connect("localhost", port, PATIENCE) if k else all_[k].accept_others(server, PATIENCE)
        except ConfigError as error:
            ((_, found[k]),) = error.problems

    threads = [threading.Thread(target=meet, args=(k,)) for k in range(len(all_))]
    with server, socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        host, first, *others, last = threads
        for thread in (host, first):
            thread.start()
        while not all_[0].links:
            time.sleep(0.01)
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
        last.start()
        for thread in (host, first, last):
            thread.join()
    for one in all_:
        for key in [*one.selector.get_map().values()]:
            key.fileobj.close()
        one.selector.close()
    return [found[k] for k in range(len(all_))]


def test_processes_meet_whatever_else_comes_and_are_told_one_port():
    ports = meeting((2, 3), (1, 3))
    assert len(set(ports)) == 1 and isinstance(ports[0], int)


def test_a_number_that_is_taken_or_another_count_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(peers, "_FIRST_NOTICE", 0.0)
    monkeypatch.setattr(peers, "_NEXT_NOTICE", 0.0)
    host, first, *others, last = meeting((1, 3), (1, 3), (1, 2), (4, 3), (2, 3))
    assert isinstance(host, int) and host == first == last
    assert re.match(
        r"distributed.process_id = 1: is taken, by process 1 \(.+, pid \d+\); each process must have", others[0]
    )
    assert others[1] == "distributed.num_processes = 2: process 0 has 3; must be the same"
    assert others[2].startswith("distributed.process_id = 4: is taken, by process 0")
    assert "waiting for process 2 of 3, " in capsys.readouterr().err


@pytest.mark.claim("lost-processes")
def test_a_process_that_does_not_come_ends_the_run_at_the_limit(tmp_path):
    arguments = ["distributed.num_processes=2", "distributed.process_id=0", "distributed.timeout=1", "mesh.data=2"]
    coordinator = f"distributed.coordinator=localhost:{free_port()}"
    with running((written(tmp_path), [*TRAIN, "test.yaml", coordinator, *arguments])) as (alone,):
        *_, problem = alone.ended(2)
    assert problem.startswith("distributed.timeout = 1: waited 1 s for process 1 of 2; start every process")


def test_a_process_that_does_not_come_is_named_after_ten_seconds_and_then_each_minute(capsys, monkeypatch):
    """By a clock that is a second later whenever somebody looks."""
    seconds = itertools.count()
    monkeypatch.setattr(peers, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(peers, "_BEAT", 0.0)
    one = Peers(0, 2, 60.0, str)
    timed_out = pytest.raises(ConfigError, match="waited 75 s for process 1 of 2")
    with one.selector, socket.create_server(("localhost", 0)) as server, timed_out:
        one.accept_others(server, 75.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"waiting for process 1 of 2, {n} of at most 75 s" for n in (10, 70)]


def test_a_port_where_another_process_0_listens_is_an_error(tmp_path):
    with socket.create_server(("", 0)) as taken:
        coordinator = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"distributed\.coordinator = 'localhost:\d+': .*Address already in use"):
            processes.join(Distributed(coordinator, 2, 0), tmp_path, lambda out: [])


def test_a_process_0_that_cannot_be_reached_is_an_error(tmp_path):
    nowhere = f"localhost:{free_port()}"
    said = rf"distributed\.timeout = 0.5: waited 0.5 s for process 0 at {nowhere} \(.*Connection refused"
    with pytest.raises(ConfigError, match=said):
        processes.join(Distributed(nowhere, 2, 1, timeout=0.5), tmp_path, lambda out: [])


@pytest.mark.parametrize(
    "environment, place",
    [
        (
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_JOB_ID": "4097"} | nodes,
            Place(f"{host}:61441", 4, 3),
        )
        for nodes, host in [
            ({"SLURM_STEP_NODELIST": "node001"}, "node001"),
            ({"SLURM_STEP_NODELIST": "node001,host2"}, "node001"),
            ({"SLURM_STEP_NODELIST": "node[001-0015],host2"}, "node001"),
            ({"SLURM_STEP_NODELIST": "node-x[007,009-015]"}, "node-x007"),
            ({"SLURM_STEP_NODELIST": "n1", "JAX_COORDINATOR_PORT": "61441"}, "n1"),
        ]
    ]
    + [
        (
            {
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_MCA_orte_hnp_uri": uri,
                "SLURM_STEP_NUM_TASKS": "1",
            },
            Place(address, 2, 1),
        )
        for uri, address in [
            ("1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911", "10.96.0.1:62624"),
            ("1531576320.0;tcp://10.96.0.1:34911", "10.96.0.1:62624"),
            ("1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d:c083::2]:43370", "fe80::b9b:ac5d:62880"),
        ]
    ]
    + [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "x", "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, None),  # Open MPI 5: JAX asks mpi4py
    ],
)
def test_a_launcher_says_where_the_processes_are_as_jax_finds_them(monkeypatch, environment, place):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_COORD"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found, said = find_place(Distributed())
    assert found == place and said.startswith("distributed.coordinator = None, and {")


# ---- signals ----

STOPPED = "stopped by {}; what came after the last checkpoint is not saved"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_program_is_imported_is_a_line(tmp_path, number):
    with running((tmp_path, ["-m", "models.train", "none.yaml"])) as (program,):
        program.until(program.listens)
        program.process.send_signal(number)
        assert program.ended(128 + number) == [STOPPED.format(number.name)]


# As if the main thread hung in C++: whatever signal comes, libc's `system` waits for its shell. The shell says when it
# is waited for; it ends with this process, the only one that can write to its input.
STUCK = """
import ctypes, os
from models import signals
signals.PATIENCE = 0.1
signals.install()
reader, writer = os.pipe()
os.dup2(reader, 0)
with signals.handled():
    ctypes.CDLL(None).system(b"echo stuck; read line")
"""

TRAINS = """
import time
from models import signals
signals.install()
with signals.handled(), signals.noted() as received:
    while True:
        print("trains", received(), flush=True)
        time.sleep(0.01)
"""


def test_a_signal_while_it_compiles_in_cpp_is_a_line(tmp_path):
    with running((tmp_path, ["-c", STUCK])) as (program,):
        program.until(lambda: "stuck" in program.out.read_text())
        program.process.terminate()
        assert program.ended(128 + signal.SIGTERM) == [STOPPED.format("SIGTERM")]


def test_a_signal_while_it_trains_is_told_and_a_second_ends_it_at_once(tmp_path):
    with running((tmp_path, ["-c", TRAINS])) as (program,):
        program.until(lambda: "trains 0" in program.out.read_text())
        program.process.terminate()
        program.until(lambda: f"trains {signal.SIGTERM:d}" in program.out.read_text())
        time.sleep(0.3)  # if shorter, it counts as one signal sent twice
        program.process.send_signal(signal.SIGINT)
        first, second = program.ended(128 + signal.SIGINT)
    assert first == "SIGTERM: the step is finished and saved, then this run ends; a second signal ends it at once"
    assert second == "stopped by a second signal, SIGINT, at once; what came after the last checkpoint is not saved"
