"""train.tensorboard: event files that hold what metrics.jsonl holds."""

import struct
import sys
from pathlib import Path

import jax
import pytest
from test_full_disk import files_of_at_most
from test_train import EIGHT, compiled_fast, config, losses  # noqa: F401

from models import tensorboard, train
from models.config import Config, Train
from models.files import Unwritable
from models.reading import ConfigError

proto = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs the extra `tensorboard`")


def read(path: Path) -> list:
    """Return the events of a file: each has its length in 8 bytes, their checksum in 4, itself, its checksum in 4."""
    content, found = path.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        found.append(proto.Event.FromString(content[12 : 12 + length]))
        content = content[12 + length + 4 :]
    return found


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """Return the curves as TensorBoard shows them: a start hides the steps of earlier starts from its own on."""
    shown: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns):
        for event in read(path):
            if event.HasField("session_log"):
                shown = {name: {s: y for s, y in curve.items() if s < event.step} for name, curve in shown.items()}
            for value in event.summary.value:
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


@pytest.mark.slow
@pytest.mark.claim("tensorboard")
def test_a_run_that_goes_on_shows_what_its_metrics_hold(config, tmp_path):  # noqa: F811
    out = tmp_path / "out"
    asked = [str(config), *EIGHT, f"train.out={out}", "train.tensorboard=true", "train.checkpoint_every=2"]
    assert train.main([*asked, "train.steps=4"]) == 0
    (out / "checkpoints" / "4").rename(tmp_path / "lost")  # as if it had been killed behind step 2
    assert train.main([*asked, "train.steps=5"]) == 0
    shown = curves(out / "tensorboard")
    assert shown.keys() == {
        *("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second"),
        *("train/host_peak_bytes", "valid/loss"),
    }
    for name, key in (("train/loss", "loss"), ("train/grad_norm", "grad_norm"), ("valid/loss", "valid_loss")):
        assert shown[name] == pytest.approx(losses(out, key), rel=1e-6), name
    assert list(shown["train/loss"]) == [1, 2, 3, 4, 5]
    assert len([*(out / "tensorboard").iterdir()]) == 2


def test_only_the_first_process_writes_and_only_where_asked(tmp_path, monkeypatch):
    asked = Config(train=Train(out=str(tmp_path), tensorboard=True))
    with tensorboard.events(Config(train=Train(out=str(tmp_path))), 0) as write:
        write({"step": 1, "loss": 2.0})
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with tensorboard.events(asked, 0) as write:
        write({"step": 1, "loss": 2.0})
    assert not [*tmp_path.iterdir()]


def test_an_event_is_on_the_disk_at_once_and_a_full_disk_is_named(tmp_path):
    asked = Config(train=Train(out=str(tmp_path), tensorboard=True))
    with pytest.raises(Unwritable) as caught, tensorboard.events(asked, 0) as write:
        write({"step": 1, "loss": float("nan"), "mfu": None})
        (path,) = (tmp_path / "tensorboard").iterdir()
        assert [value.tag for event in read(path) for value in event.summary.value] == ["train/loss"]
        with files_of_at_most(path.stat().st_size + 10):
            write({"step": 2, "loss": 1.0})
    assert caught.value.filename == str(tmp_path / "tensorboard")


def test_without_tensorboardx_the_config_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    tensorboard.check(Config())
    with pytest.raises(ConfigError, match=r"train\.tensorboard = True: tensorboardX is not installed: pip install"):
        tensorboard.check(Config(train=Train(tensorboard=True)))
