"""SIGINT and SIGTERM: a line at once, whatever the main thread is doing, and exit status 130 or 143.

| while | the first signal | a second |
|---|---|---|
| the program starts: `install` | ends the process | |
| it runs: `handled` | raises `Stopped` in the main thread, so that temporary files are removed | ends the process |
| it trains: `noted` | is noted; the loop saves a checkpoint and returns | ends the process |

Python runs a signal's handler in the main thread, once that is out of C++, where XLA compiles for minutes; so a thread
of its own reads the numbers of the signals that came, prints the line, and ends a process whose main thread does not
unwind within PATIENCE seconds. Imports nothing heavy: the program installs it before its other imports.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

PATIENCE = 10.0  # seconds
_ONE = 0.2  # seconds in which two are one: timeout(1) sends a signal to its child, and then to the child's group
ENDING = (signal.SIGINT, signal.SIGTERM)

before_exit: list[Callable[[str], None]] = []  # called with what happened where a signal ends the process


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM, in the main thread. The line is printed already."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class _Listening:
    """Handlers of both signals, and the thread that tells of them."""

    def __init__(self) -> None:
        self.phase = "starting"  # or running, or training
        self.came = 0  # the last signal
        self.raised = 0  # the one that was raised in the main thread
        self.told = threading.Event()  # the line of the first is printed
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.before = {number: signal.getsignal(number) for number in ENDING}
        self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.claim()
        self.thread = threading.Thread(target=self.listen, args=(reader,), name="signals", daemon=True)
        self.thread.start()

    def claim(self) -> None:
        for number in ENDING:
            signal.signal(number, self.handle)

    def close(self) -> None:
        """Gives the signals back, once all that came are told."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        os.close(self.writer)
        self.thread.join()

    def wait(self) -> None:
        """Returns once the line of a signal that came is printed: a thread that is late must still find its phase, and
        the process must not end before it."""
        if self.came:
            self.told.wait(PATIENCE)

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.came = number
        if self.phase == "running" and not self.raised:
            self.raised = number
            raise Stopped(number)

    def listen(self, reader: int) -> None:
        timer, first = None, 0.0
        while byte := os.read(reader, 1):
            if (number := byte[0]) not in ENDING or time.monotonic() - first < _ONE:
                continue
            self.came, name = number, signal.Signals(number).name
            again, first = bool(first), first or time.monotonic()
            if again:
                tell(f"stopped by a second signal, {name}, at once; what came after the last checkpoint is not saved")
                _exit(number)
            elif self.phase == "training":
                tell(f"{name}: the step is finished and saved, then this run ends; a second signal ends it at once")
            else:
                tell(f"stopped by {name}; what came after the last checkpoint is not saved")
                if self.phase == "starting" and not self.raised:  # else the main thread unwinds: it may be here already
                    _exit(number)
                timer = threading.Timer(PATIENCE, _exit, (number,))
                timer.daemon = True
                timer.start()
            self.told.set()
        os.close(reader)
        if timer:
            timer.cancel()


_listening: _Listening | None = None


def install() -> None:
    """From here on, until the process ends, the signals are the program's. Call it in the main thread."""
    global _listening
    _listening = _Listening()


def claim() -> None:
    """Takes the signals back from who has set another handler, such as JAX's preemption service for SIGTERM."""
    if _listening:
        _listening.claim()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Raises `Stopped` here where a signal comes; in place of an error, too, that somebody has made of it: JAX makes a
    ValueError of what is raised where it compares keys of its caches."""
    global _listening
    here = _listening is None
    if here:
        install()
    assert _listening is not None
    listening, unraisable = _listening, sys.unraisablehook

    def lost(what: "sys.UnraisableHookArgs") -> None:  # raised in a callback, which Python would print and forget
        if what.exc_type is not Stopped:
            unraisable(what)

    sys.unraisablehook = lost
    listening.phase = "running"
    try:
        yield
    except Exception as error:
        if listening.raised:
            raise Stopped(listening.raised) from error
        raise
    finally:
        listening.phase = "starting"  # ends at once what comes while the process ends
        listening.wait()
        sys.unraisablehook = unraisable
        if here:
            listening.close()
            _listening = None


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], int]]:
    """Inside `handled`: yields a function that says which signal came, or 0.

    Raises:
      Stopped: one came before, and was lost in a callback of Python's.
    """
    listening = _listening
    assert listening is not None
    listening.phase = "training"
    try:
        if listening.raised:
            raise Stopped(listening.raised)
        yield lambda: listening.came
    finally:
        listening.wait()
        listening.phase = "running"


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _exit(number: int) -> None:
    for call in before_exit:
        call(f"was stopped by {signal.Signals(number).name}")
    os._exit(128 + number)
