"""On a terminal, a bar with the time left below the lines of a run; elsewhere lines only."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
from tqdm import tqdm

tqdm.set_lock(threading.RLock())  # its own is for several processes, and multiprocessing may start one for it


@contextlib.contextmanager
def bar(start: int, steps: int) -> Iterator[Callable[[], object]]:
    """Show a bar of `steps`, of which `start` are taken, if this is process 0; yield what to call behind each step."""
    hidden = True if jax.process_index() else None  # None: unless stderr is a terminal
    with tqdm(total=steps, initial=start, unit="step", disable=hidden, dynamic_ncols=True, leave=False) as shown:
        yield shown.update


def show(text: str) -> None:
    """Print a line, above the bar if there is one."""
    with tqdm.external_write_mode():
        print(text, flush=True)
