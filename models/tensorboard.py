"""TensorBoard's event files beside metrics.jsonl, for `train.tensorboard`.

They are written with the synchronous parts of tensorboardX. Its SummaryWriter writes on a thread, which a full disk
ends; then the training loop would wait for ever to put an event into the thread's queue.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from models.config import Config
from models.files import as_unwritable
from models.reading import config_error

FOLDER = "tensorboard"


def check(config: Config) -> None:
    """Raise ConfigError if `train.tensorboard` is set and tensorboardX is missing."""
    try:
        if config.train.tensorboard:
            importlib.import_module("tensorboardX")
    except ImportError as error:
        why = "tensorboardX is not installed: pip install 'jaxoffload[tensorboard]', or give false"
        raise config_error("train.tensorboard", True, why) from error


@contextlib.contextmanager
def events(config: Config, start: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that writes a record of metrics.jsonl. It does nothing in other processes than the first.

    Each start of a run has a file of its own, in `tensorboard/` of the run's folder. It tells TensorBoard to drop what
    an earlier start wrote of steps after `start`, the checkpoint's.
    """
    if not config.train.tensorboard or jax.process_index():
        yield lambda record: None
        return
    writer = importlib.import_module("tensorboardX.event_file_writer")
    proto = importlib.import_module("tensorboardX.proto.event_pb2")
    scalar = importlib.import_module("tensorboardX.summary").scalar
    folder = Path(config.train.out) / FOLDER

    def write(step: int, **content: Any) -> None:
        with as_unwritable(folder):
            file.write_event(proto.Event(wall_time=time.time(), step=step, **content))
            file.flush()

    def write_record(record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            write(record["step"], summary=scalar(name, value))

    with as_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The library's name has seconds, in which two processes can start.
        file = writer.EventsWriter(str(folder / "events"), f".{os.getpid()}.{start}")
    with contextlib.closing(file):
        write(start + 1 if start else 0, session_log=proto.SessionLog(status=proto.SessionLog.START))
        yield write_record


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the name in TensorBoard -> the value, for each number of a record."""
    numbers = {key: value for key, value in record.items() if key != "step" and value is not None}
    if "valid_loss" in numbers:
        return {"valid/loss": numbers["valid_loss"]}
    return {f"train/{key}": value for key, value in numbers.items()}
