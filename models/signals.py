"""SIGINT and SIGTERM: a message at once, whatever the main thread is doing, and exit status 130 or 143.

| phase | the first signal | a second signal |
|---|---|---|
| starting: `install` | ends the process | |
| running: `handled` | raises `Stopped` in the main thread, so that temporary files are removed | ends the process |
| training: `noted` | is noted; the loop saves a checkpoint and returns | ends the process |

Python runs signal handlers in the main thread, once that has returned from C++, where XLA compiles for minutes. So
another thread reads the numbers of received signals, prints the message, and ends the process if its main thread does
not unwind within PATIENCE seconds. This module imports nothing heavy: the program installs it before its other imports.
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
_SAME_SIGNAL = 0.2  # seconds; timeout(1) sends a signal to its child, and again to the child's group
ENDING = (signal.SIGINT, signal.SIGTERM)

before_exit: list[Callable[[str], None]] = []  # called with the reason before a signal ends the process


class Stopped(KeyboardInterrupt):
    """SIGINT or SIGTERM, raised in the main thread. The message has been printed."""

    def __init__(self, number: int):
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")


class _Listening:
    """The handlers of both signals, and the thread that prints the messages."""

    def __init__(self) -> None:
        self.phase = "starting"  # or running, or training
        self.received = 0  # the last signal
        self.raised = 0  # the signal that was raised in the main thread
        self.printed = threading.Event()  # set once the message of the first signal is printed
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.before = {number: signal.getsignal(number) for number in ENDING}
        self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.claim()
        self.thread = threading.Thread(target=self.listen, args=(reader,), name="signals", daemon=True)
        self.thread.start()

    def claim(self) -> None:
        """Make this the handler of both signals."""
        for number in ENDING:
            signal.signal(number, self.handle)

    def close(self) -> None:
        """Restore the handlers from before, and wait for the thread."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.wakeup)
        os.close(self.writer)
        self.thread.join()

    def wait(self) -> None:
        """If a signal was received, wait until its message is printed, before the phase changes or the process ends."""
        if self.received:
            self.printed.wait(PATIENCE)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; called by Python in the main thread."""
        self.received = number
        if self.phase == "running" and not self.raised:
            self.raised = number
            raise Stopped(number)

    def listen(self, reader: int) -> None:
        """Read signal numbers from the pipe until it is closed; the body of the thread."""
        timer, first = None, 0.0
        while byte := os.read(reader, 1):
            if (number := byte[0]) not in ENDING or time.monotonic() - first < _SAME_SIGNAL:
                continue
            self.received, name = number, signal.Signals(number).name
            again, first = bool(first), first or time.monotonic()
            if again:
                tell(f"stopped by a second signal, {name}, at once; what came after the last checkpoint is not saved")
                _exit(number)
            elif self.phase == "training":
                tell(f"{name}: the step is finished and saved, then this run ends; a second signal ends it at once")
            else:
                tell(f"stopped by {name}; what came after the last checkpoint is not saved")
                if self.phase == "starting" and not self.raised:  # otherwise the main thread unwinds, or has done so
                    _exit(number)
                timer = threading.Timer(PATIENCE, _exit, (number,))
                timer.daemon = True
                timer.start()
            self.printed.set()
        os.close(reader)
        if timer:
            timer.cancel()


_listening: _Listening | None = None


def install() -> None:
    """Handle both signals until the process ends. Call it in the main thread."""
    global _listening
    _listening = _Listening()


def claim() -> None:
    """Replace handlers that others have set since, such as JAX's preemption service for SIGTERM."""
    if _listening:
        _listening.claim()


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Raise `Stopped` in the main thread when a signal is received.

    Code in between can replace the exception (JAX raises a ValueError for any that it meets while it compares cache
    keys); `Stopped` is then raised here instead. Python ignores exceptions in callbacks such as `__del__`, after it has
    called `sys.unraisablehook`; while this context is open, the hook does not print `Stopped`.
    """
    global _listening
    installed_here = _listening is None
    if installed_here:
        install()
    assert _listening is not None
    listening, unraisable = _listening, sys.unraisablehook

    def hook(what: "sys.UnraisableHookArgs") -> None:
        if what.exc_type is not Stopped:
            unraisable(what)

    sys.unraisablehook = hook
    listening.phase = "running"
    try:
        yield
    except Exception as error:
        if listening.raised:
            raise Stopped(listening.raised) from error
        raise
    finally:
        listening.phase = "starting"  # a signal at this point ends the process at once
        listening.wait()
        sys.unraisablehook = unraisable
        if installed_here:
            listening.close()
            _listening = None


@contextlib.contextmanager
def noted() -> Iterator[Callable[[], int]]:
    """Inside `handled`, note signals instead of raising them; yield a function that returns the one received, or 0.

    Raises:
      Stopped: a signal was received before, and its exception was ignored in a callback.
    """
    listening = _listening
    assert listening is not None
    listening.phase = "training"
    try:
        if listening.raised:
            raise Stopped(listening.raised)
        yield lambda: listening.received
    finally:
        listening.wait()
        listening.phase = "running"


def tell(line: str) -> None:
    """Print to stderr, at once; on a terminal below what stands there, such as ^C or a progress bar."""
    print("\n" * sys.stderr.isatty() + line, file=sys.stderr, flush=True)


def _exit(number: int) -> None:
    for call in before_exit:
        call(f"was stopped by {signal.Signals(number).name}")
    os._exit(128 + number)
