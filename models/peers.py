"""The processes of a run watch each other: they meet before JAX connects them, and none waits for a lost one.

Process 0 listens. Each other process connects to it, and both ends of a connection send a line of JSON per second. A
process was killed if its connection closes before it has said that it leaves. It hangs (SIGSTOP, a dead machine or
network) if nothing is received for `silence` seconds. A thread sends the lines, so a process can compile, validate or
write for any length of time; for the same reason a process whose main thread alone is stuck is not noticed, unless that
thread holds the GIL.
"""

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxoffload import Problem
from models.reading import ConfigError
from models.signals import tell

LOST = 5  # exit status of a process that ends because another was lost
_BEAT = 1.0  # seconds between two lines
_GRACE = 10.0  # seconds that a process has to end by itself after another has left with an error
_SAME_ERROR = 3.0  # seconds within which an error that all processes have reaches each of them
_FIRST_NOTICE, _NEXT_NOTICE = 10.0, 60.0  # seconds until a process says what it waits for; between two notices
_MAX_LINE = 1 << 16  # bytes; a longer line is from another program


class Link:
    """A connection to another process."""

    def __init__(self, connection: socket.socket, name: str = ""):
        connection.setblocking(False)
        self.connection, self.name, self.tail = connection, name, b""
        self.received_at = time.monotonic()  # when something was received last
        self.age = 0.0  # seconds; `Peers.age` on the other side, at that time
        self.closed = False
        self.left_at: float | None = None  # when it said that it ends
        self.reason: str | None = None  # why it ends, if the run is not finished

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # `receive` notices a closed connection
            self.connection.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages received; set `closed`."""
        try:
            data = self.connection.recv(_MAX_LINE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self.tail = (self.tail + data).split(b"\n")
        self.closed = not data or len(self.tail) > _MAX_LINE
        self.received_at = time.monotonic()
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.closed = True
            return []


class Peers:
    """The connections of this process: from process 0 to all others, from each other process to process 0."""

    def __init__(self, index: int, count: int, silence: float, advice: Callable[[], str]):
        """`silence`: seconds. `advice()`: what the user can do when a process is lost."""
        self.index, self.count, self.silence, self.advice = index, count, silence, advice
        self.links: dict[int, Link] = {}
        self.selector = selectors.DefaultSelector()
        self.latest: dict[str, Any] = {}  # message of process 0, before the run
        self.leaving = False  # this process ends, and no longer watches the others
        self.finished = False  # all processes have finished the run
        self.failed_at = 0.0  # when the main thread failed

    # ---- before the run; both return the port for JAX's coordination service, on the machine of process 0 ----

    def accept_others(self, server: socket.socket, timeout: float) -> int:
        """Wait for all other processes; for process 0.

        Raises:
          ConfigError: they do not connect within `timeout` seconds.
        """
        self.selector.register(server, selectors.EVENT_READ)
        waiting = _Waiting(timeout)
        while missing := [k for k in range(1, self.count) if k not in self.links]:
            if problem := waiting.overdue(f"{_processes(missing)} of {self.count}"):
                self.send(refused=problem)
                raise ConfigError([Problem("distributed", problem)])
            self.receive(_BEAT)
            self.links = {k: link for k, link in self.links.items() if not link.closed}
            self.send(missing=missing)
        with socket.create_server(("", 0)) as probe:  # closed now, for JAX to listen on
            port = probe.getsockname()[1]
        self.send(go=port)
        return port

    def connect(self, host: str, port: int, timeout: float) -> int:
        """Connect to process 0, and wait with it for the others.

        Raises:
          ConfigError: they do not connect within `timeout` seconds, or process 0 refuses this process.
        """
        waiting, missing = _Waiting(timeout), f"process 0 at {host}:{port}"
        while not (problem := waiting.overdue(missing)):
            if 0 not in self.links:
                try:
                    connection = _connection(host, port)
                except OSError as error:
                    missing = f"process 0 at {host}:{port} ({error})"
                    time.sleep(_BEAT / 4)
                    continue
                self.links[0] = self.open_link(connection, f"process 0 ({host}:{port})")
                me = f"{socket.gethostname()}, pid {os.getpid()}"
                self.send(jaxoffload=1, process=self.index, of=self.count, name=me)
            self.receive(_BEAT)
            if "refused" in self.latest:
                raise ConfigError([Problem("distributed", str(self.latest["refused"]))])
            if "go" in self.latest:
                return int(self.latest["go"])
            if "missing" in self.latest:
                missing = f"{_processes(self.latest['missing'])} of {self.count}"
            if self.links[0].closed:
                del self.links[0]
                time.sleep(_BEAT / 4)
        raise ConfigError([Problem("distributed", problem)])

    def admit(self, link: Link, hello: dict[str, Any]) -> None:
        """Add the process that sent `hello` to the links, or tell it why not."""
        index, count = hello.get("process"), hello.get("of")
        if "jaxoffload" not in hello or not isinstance(index, int):
            link.closed = True
        elif count != self.count:
            link.send(refused=f"distributed.num_processes = {count}: process 0 has {self.count}; must be the same")
        elif index in self.links or not 0 < index < self.count:
            taken = self.links[index].name if index in self.links else "process 0"
            link.send(
                refused=f"distributed.process_id = {index}: is taken, by {taken}; each process must have a number of "
                f"its own below distributed.num_processes = {self.count}"
            )
        else:
            link.name = f"process {index} ({hello.get('name')})"
            self.links[index] = link

    # ---- during the run ----

    def watch(self) -> None:
        """Watch the other processes, in a thread, until this process leaves."""
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _watch(self) -> None:
        last = beat = time.monotonic()
        while not self.leaving:
            self.receive(max(0.0, beat - time.monotonic()))
            now = time.monotonic()
            if now - last > self.silence / 2:  # this process itself was stopped: let the others report first
                for link in self.links.values():
                    link.received_at = now
            last = now
            if now >= beat:
                self.send(age=0.0 if self.index else self.age(now))  # only process 0 has other links
                beat = now + _BEAT
            self.check_links(now)

    def age(self, now: float) -> float:
        """Return the greatest number of seconds since any other running process is known to have been alive."""
        running = [link for link in self.links.values() if link.left_at is None or link.reason]
        return max((now - (link.left_at or link.received_at) + link.age for link in running), default=0.0)

    def check_links(self, now: float) -> None:
        """End this process if another one is lost."""
        for link in self.links.values():
            if self.leaving:
                return
            if link.left_at is not None:
                if link.reason and (link.left_at < self.failed_at or now - link.left_at > _GRACE):
                    self.abort(f"{link.name} {link.reason}")
            elif link.closed:
                self.abort(f"{link.name} is gone: it was killed, or crashed")
            elif now - link.received_at > self.silence:
                self.abort(
                    f"{link.name} has been silent for {self.silence:g} s (distributed.silence): it hangs or is "
                    "stopped, or its machine or the network is down"
                )

    def abort(self, message: str) -> None:
        """End this process, and tell the others why."""
        self.send(lost=message)
        tell(f"{message}; {self.advice()}")
        os._exit(LOST)  # the main thread may be waiting in C++ for the lost process

    def confirm_alive(self) -> None:
        """Return once all other processes are known to have been alive when this one failed.

        If one was lost before, that is why this one failed, and the watching thread ends this process.
        """
        self.failed_at = time.monotonic()
        time.sleep(_SAME_ERROR)
        while (now := time.monotonic()) - self.age(now) <= self.failed_at:
            time.sleep(_BEAT / 20)

    def leave(self, reason: str) -> None:
        """Tell the others that this process ends before the run is finished, and why."""
        self.leaving = True
        self.send(left=reason)

    def finish(self) -> None:
        """Tell the others that the run is finished; return once it is finished for them too."""
        self.send(left=None)
        while any(link.left_at is None or link.reason for link in self.links.values()):
            time.sleep(_BEAT / 20)
        self.leaving = self.finished = True

    # ---- connections ----

    def open_link(self, connection: socket.socket, name: str = "") -> Link:
        link = Link(connection, name)
        self.selector.register(connection, selectors.EVENT_READ, link)
        return link

    def send(self, **message: Any) -> None:
        for link in self.links.values():
            link.send(**message)

    def receive(self, seconds: float) -> None:
        """Accept connections and handle messages, for at most `seconds`."""
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):
                    self.open_link(key.fileobj.accept()[0])
                continue
            link = key.data
            for message in link.receive():
                if link in self.links.values():
                    self.handle(link, message)
                else:
                    self.admit(link, message)
            if link.closed:
                self.selector.unregister(link.connection)
                link.connection.close()

    def handle(self, link: Link, message: dict[str, Any]) -> None:
        if "lost" in message:
            self.abort(str(message["lost"]))
        elif "left" in message:
            link.left_at, link.reason = link.received_at, message["left"]
        elif "age" in message:
            link.age = float(message["age"])
        else:
            self.latest = message


class _Waiting:
    """The time that a process waits for others; it prints from time to time which ones."""

    def __init__(self, timeout: float):
        self.timeout, self.begin = timeout, time.monotonic()
        self.next_notice = _FIRST_NOTICE

    def overdue(self, missing: str) -> str | None:
        """Return the error message if the time is over. `missing`: the processes waited for."""
        since = time.monotonic() - self.begin
        if since >= self.timeout:
            return (
                f"distributed.timeout = {self.timeout:g}: waited {self.timeout:g} s for {missing}; start every "
                "process, with the same distributed.coordinator, or raise the limit"
            )
        if since >= self.next_notice:
            self.next_notice += _NEXT_NOTICE
            tell(f"waiting for {missing}, {since:.0f} of at most {self.timeout:g} s")
        return None


def _connection(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_BEAT)
    if connection.getsockname() == connection.getpeername():  # with no listener, TCP can connect a port to itself
        connection.close()
        raise ConnectionRefusedError("nobody listens there")
    return connection


def _processes(numbers: list[int]) -> str:
    """[1] -> process 1; [1, 2, 5] -> processes 1, 2, 5."""
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
