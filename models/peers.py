"""The processes of a run watch each other: they meet before JAX joins them, and none waits for one that is gone.

Process 0 listens, each other process holds a connection to it, and both ends send a line of JSON a second. A process
was killed if its connection closes without last words; it hangs (SIGSTOP, a dead machine or network) if nothing comes
for `silence` seconds. The lines come from a thread, so a process may compile, validate or write for as long as it
likes; for the same reason one whose main thread alone is stuck is not found, unless it holds Python's lock.
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

LOST = 5  # the exit status of a process that ends because another did
_BEAT = 1.0  # seconds between two lines
_GRACE = 10.0  # seconds that a process has to end by itself after another's last words
_SAME = 3.0  # seconds within which all processes meet an error that they have in common
_TOLD, _AGAIN = 10.0, 60.0  # seconds until a process says whom it waits for, and between two times
_LONGEST = 1 << 16  # bytes of a line; a longer one is a stranger's


class Link:
    """A connection to another process."""

    def __init__(self, connection: socket.socket, who: str = ""):
        connection.setblocking(False)
        self.connection, self.who, self.tail = connection, who, b""
        self.heard = time.monotonic()  # when something came
        self.age = 0.0  # seconds: then, how long ago the other side had heard of each process that it knows
        self.closed = False
        self.left: float | None = None  # when it said that it ends
        self.words: str | None = None  # and why, if the run is not over

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # a closed connection shows where it is read
            self.connection.send(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """What came; sets `closed`."""
        try:
            data = self.connection.recv(_LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self.tail = (self.tail + data).split(b"\n")
        self.closed = not data or len(self.tail) > _LONGEST
        self.heard = time.monotonic()
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            self.closed = True
            return []


class Peers:
    """The connections of this process: process 0's to all others, another's to process 0."""

    def __init__(self, index: int, count: int, silence: float, advice: Callable[[], str]):
        """`advice`: what to do when a process is lost."""
        self.index, self.count, self.silence, self.advice = index, count, silence, advice
        self.links: dict[int, Link] = {}
        self.selector = selectors.DefaultSelector()
        self.news: dict[str, Any] = {}  # from process 0, while it waits for the others
        self.over = False  # this process ends: it watches the others no more
        self.parted = False  # and so do they
        self.failed = 0.0  # when the main thread did

    # ---- before the run: each returns the port where JAX's coordination service is to be, on process 0's machine ----

    def host(self, server: socket.socket, timeout: float) -> int:
        """Waits for all others.

        Raises:
          ConfigError: they do not come within `timeout` seconds.
        """
        self.selector.register(server, selectors.EVENT_READ)
        waiting = _Waiting(timeout)
        while missing := [k for k in range(1, self.count) if k not in self.links]:
            if problem := waiting.told(f"{_processes(missing)} of {self.count}"):
                self.send(refused=problem)
                raise ConfigError([Problem("distributed", problem)])
            self.hear(_BEAT)
            self.links = {k: link for k, link in self.links.items() if not link.closed}
            self.send(missing=missing)
        with socket.create_server(("", 0)) as probe:  # JAX listens there in a moment
            port = probe.getsockname()[1]
        self.send(go=port)
        return port

    def visit(self, host: str, port: int, timeout: float) -> int:
        """Waits for process 0, and with it for the others.

        Raises:
          ConfigError: they do not come within `timeout` seconds, or process 0 does not take this one.
        """
        waiting, whom = _Waiting(timeout), f"process 0 at {host}:{port}"
        while not (problem := waiting.told(whom)):
            if 0 not in self.links:
                try:
                    connection = _connection(host, port)
                except OSError as error:
                    whom = f"process 0 at {host}:{port} ({error})"
                    time.sleep(_BEAT / 4)
                    continue
                self.links[0] = self.link(connection, f"process 0 ({host}:{port})")
                me = f"{socket.gethostname()}, pid {os.getpid()}"
                self.send(jaxoffload=1, process=self.index, of=self.count, who=me)
            self.hear(_BEAT)
            if "refused" in self.news:
                raise ConfigError([Problem("distributed", str(self.news["refused"]))])
            if "go" in self.news:
                return int(self.news["go"])
            if "missing" in self.news:
                whom = f"{_processes(self.news['missing'])} of {self.count}"
            if self.links[0].closed:
                del self.links[0]
                time.sleep(_BEAT / 4)
        raise ConfigError([Problem("distributed", problem)])

    def greet(self, link: Link, hello: dict[str, Any]) -> None:
        """Takes one more process, or says why not."""
        index, count = hello.get("process"), hello.get("of")
        if "jaxoffload" not in hello or not isinstance(index, int):
            link.closed = True
        elif count != self.count:
            link.send(refused=f"distributed.num_processes = {count}: process 0 has {self.count}; must be the same")
        elif index in self.links or not 0 < index < self.count:
            taken = self.links[index].who if index in self.links else "process 0"
            link.send(
                refused=f"distributed.process_id = {index}: is taken, by {taken}; each process must have a number of "
                f"its own below distributed.num_processes = {self.count}"
            )
        else:
            link.who = f"process {index} ({hello.get('who')})"
            self.links[index] = link

    # ---- during the run ----

    def watch(self) -> None:
        """Watches, in a thread, until this process leaves."""
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _watch(self) -> None:
        last = beat = time.monotonic()
        while not self.over:
            self.hear(max(0.0, beat - time.monotonic()))
            now = time.monotonic()
            if now - last > self.silence / 2:  # it was this process that was stopped: hear the others first
                for link in self.links.values():
                    link.heard = now
            last = now
            if now >= beat:
                self.send(age=0.0 if self.index else self.age(now))  # only process 0 knows of others
                beat = now + _BEAT
            self.judge(now)

    def age(self, now: float) -> float:
        """How many seconds ago each other process that this one knows of was alive, at least."""
        running = [link for link in self.links.values() if link.left is None or link.words]
        return max((now - (link.left or link.heard) + link.age for link in running), default=0.0)

    def judge(self, now: float) -> None:
        for link in self.links.values():
            if self.over:
                return
            if link.left is not None:
                if link.words and (link.left < self.failed or now - link.left > _GRACE):
                    self.end(f"{link.who} {link.words}")
            elif link.closed:
                self.end(f"{link.who} is gone, without a word: it was killed, or crashed")
            elif now - link.heard > self.silence:
                self.end(
                    f"{link.who} has been silent for {self.silence:g} s (distributed.silence): it hangs or is stopped, "
                    "or its machine or the network is down"
                )

    def end(self, sentence: str) -> None:
        self.send(lost=sentence)
        tell(f"{sentence}; {self.advice()}")
        os._exit(LOST)  # the main thread may wait in C++ for the process that is gone

    def sound(self) -> None:
        """Returns once each process has shown that it lived when this one failed. Where one had gone, that is why, and
        the thread ends this process."""
        self.failed = time.monotonic()
        time.sleep(_SAME)
        while (now := time.monotonic()) - self.age(now) <= self.failed:
            time.sleep(_BEAT / 20)

    def leave(self, words: str) -> None:
        """Tells the others that this process ends before the run does, and why."""
        self.over = True
        self.send(left=words)

    def part(self) -> None:
        """Returns once the run is over for the others, too, who are watched until then."""
        self.send(left=None)
        while any(link.left is None or link.words for link in self.links.values()):
            time.sleep(_BEAT / 20)
        self.over = self.parted = True

    # ---- lines ----

    def link(self, connection: socket.socket, who: str = "") -> Link:
        link = Link(connection, who)
        self.selector.register(connection, selectors.EVENT_READ, link)
        return link

    def send(self, **message: Any) -> None:
        for link in self.links.values():
            link.send(**message)

    def hear(self, seconds: float) -> None:
        """Reads what comes within `seconds`."""
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(OSError):
                    self.link(key.fileobj.accept()[0])
                continue
            link = key.data
            for message in link.receive():
                if link in self.links.values():
                    self.note(link, message)
                else:
                    self.greet(link, message)
            if link.closed:
                self.selector.unregister(link.connection)
                link.connection.close()

    def note(self, link: Link, message: dict[str, Any]) -> None:
        if "lost" in message:
            self.end(str(message["lost"]))
        elif "left" in message:
            link.left, link.words = link.heard, message["left"]
        elif "age" in message:
            link.age = float(message["age"])
        else:
            self.news = message


class _Waiting:
    """Says now and then for whom a process waits, and for how long."""

    def __init__(self, timeout: float):
        self.timeout, self.begin = timeout, time.monotonic()
        self.next = _TOLD

    def told(self, whom: str) -> str | None:
        """What is wrong, when the time is over."""
        since = time.monotonic() - self.begin
        if since >= self.timeout:
            return (
                f"distributed.timeout = {self.timeout:g}: waited {self.timeout:g} s for {whom}; start every process, "
                "with the same distributed.coordinator, or raise the limit"
            )
        if since >= self.next:
            self.next += _AGAIN
            tell(f"waiting for {whom}, {since:.0f} of at most {self.timeout:g} s")
        return None


def _connection(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_BEAT)
    if connection.getsockname() == connection.getpeername():  # where nobody listens, the own port can be that one
        connection.close()
        raise ConnectionRefusedError("nobody listens there")
    return connection


def _processes(numbers: list[int]) -> str:
    """[1] -> process 1; [1, 2, 5] -> processes 1, 2, 5."""
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
