"""models/checkpoints.py: what is restored is what was saved, on any mesh; what is not is refused."""

import gc
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import checkpoints, transformer
from models.config import Config, ConfigError, Data, Mesh, Model, Train
from models.data import open_data
from models.sharding import make_mesh
from models.step import program, shardings_of

TINY = Model(vocab_size=300, layers=1, d_model=16, heads=2, kv_heads=2, d_ff=16, dtype="float32")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} " * 100)
    train = Train(batch_size=8, seq_len=32, eval_batches=1)
    return Config(model=TINY, data=Data(path=f"{folder}/*.txt", valid_fraction=0.2), train=train)


def opened(config: Config):
    """Return the program and the data of a config."""
    return program(config, make_mesh(config.mesh, jax.devices()[: config.mesh.fsdp])), open_data(config)


def drawn(made, step: int):
    """Return a state with random values, sharded."""
    draw = np.random.default_rng(step).standard_normal
    values = jax.tree.map(lambda x: draw(x.shape).astype(x.dtype), made.state)._replace(step=np.int32(step))
    return jax.device_put(values, shardings_of(made.state))


@pytest.fixture(scope="module")
def written(config, tmp_path_factory) -> Path:
    """The folder of a run that saved steps 2 and 4, which read a batch each step."""
    out = tmp_path_factory.mktemp("written")
    made, source = opened(config)
    with checkpoints.open_manager(out) as manager:
        for step in range(1, 5):
            next(source.batches)
            if step % 2 == 0:
                checkpoints.save(manager, step, drawn(made, step), config, source)
    return out


def resumed(out: Path, config: Config):
    """Return the state, and the batch after it."""
    made, source = opened(config)
    with checkpoints.open_manager(out) as manager:
        return checkpoints.resume(manager, config, made, source), next(source.batches)


def refused(out: Path, config: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        resumed(out, config)
    return str(caught.value)


@pytest.mark.claim("goes-on")
@pytest.mark.parametrize("fsdp", [1, 4])
def test_what_was_saved_comes_back_on_any_mesh_with_the_next_batch(written, config, fsdp):
    config = replace(config, mesh=Mesh(fsdp=fsdp))
    state, batch = resumed(written, config)
    made, source = opened(config)
    jax.tree.map(np.testing.assert_array_equal, state, drawn(made, 4))
    assert shardings_of(state) == shardings_of(made.state)
    batches = [next(source.batches) for _ in range(5)]
    np.testing.assert_array_equal(batch, batches[4])
    assert not np.array_equal(batch, batches[3])


@pytest.mark.claim("either-dtype")
@pytest.mark.parametrize("before, after", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_goes_on_with_weights_of_another_dtype_and_loses_no_bit(config, tmp_path, before, after):
    """And with its optimizer elsewhere. There and back again, all is as it was."""
    config = replace(config, remat=replace(config.remat, min_offload_bytes=0))
    settings = {
        name: replace(
            config, model=replace(TINY, param_dtype=name), train=replace(config.train, optimizer_on_host=name == after)
        )
        for name in (before, after)
    }
    first = drawn(opened(settings[before])[0], 1)
    for step, name in enumerate((before, after), start=1):
        made, source = opened(settings[name])
        next(source.batches)
        with checkpoints.open_manager(tmp_path) as manager:
            state = checkpoints.resume(manager, settings[name], made, source) if step > 1 else first
            assert shardings_of(state) == shardings_of(made.state)
            checkpoints.save(manager, step, state, settings[name], source)
    again, _ = resumed(tmp_path, settings[before])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {after, "float32"}
    jax.tree.map(np.testing.assert_array_equal, again, first)
    wide, narrow = (first, state) if before == "float32" else (state, first)
    for weight, master in zip(jax.tree.leaves(narrow.params), jax.tree.leaves(wide.params), strict=True):
        np.testing.assert_allclose(np.asarray(weight, np.float32), master, rtol=2**-8)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[random.Random(file.name).randrange(len(content))] ^= 1 << random.Random(0).randrange(8)
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.claim("damage")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's other reads, when one fails
def test_a_flipped_bit_in_any_file_is_refused_or_changes_nothing(written, config, tmp_path):
    """Some bits mean nothing, such as those of times."""
    files = [path.relative_to(written) for path in (written / "checkpoints/4").rglob("*") if path.is_file()]
    want, found = resumed(written, config), set()
    for number, file in enumerate(files):
        out = shutil.copytree(written, tmp_path / str(number))
        flip(out / file)
        try:
            got = resumed(out, config)
        except ConfigError as error:
            found.add(file)
            assert f"{out}/checkpoints/4" in str(error) and "delete it to continue from step 2" in str(error)
        else:
            jax.tree.map(np.testing.assert_array_equal, got, want)
    told = {"origin/metadata", "state/_METADATA", "state/manifest.ocdbt"}
    assert {f"checkpoints/4/{name}" for name in told} <= set(map(str, found))
    assert [file for file in found if file.parent.name == "d"]  # values
    gc.collect()  # those other reads, whose warnings only this test ignores


@pytest.mark.claim("damage")
def test_any_bit_of_an_array_changes_its_checksum_and_so_do_places():
    mesh = make_mesh(Mesh(fsdp=4), jax.devices()[:4])
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    value = np.random.default_rng(0).standard_normal((8, 3)).astype(np.float32)
    sums = lambda value: checkpoints.sums({"w": jax.device_put(value, over)})
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    assert checkpoints.sums({"w": jax.device_put(value, whole)}) == sums(value)
    for bit in range(32):
        changed = value.copy()
        changed.view(np.uint32)[5, 1] ^= np.uint32(1 << bit)
        assert sums(changed) != sums(value)
    assert sums(value[::-1].copy()) != sums(value) != sums(value[:, ::-1].copy())


@pytest.mark.claim("damage")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_who_deletes_a_damaged_checkpoint_continues_from_the_one_before(written, config, tmp_path):
    out = shutil.copytree(written, tmp_path / "out")
    for file in (out / "checkpoints/4/state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert "delete it to continue from step 2" in refused(out, config)
    shutil.rmtree(out / "checkpoints/4")
    assert int(resumed(out, config)[0].step) == 2
    shutil.move(out / "checkpoints/2", out / "checkpoints/6")
    assert "delete it to start again" in refused(out, config)
    gc.collect()


@pytest.mark.claim("goes-on")
def test_what_a_kill_left_is_removed(written, config, tmp_path):
    out = shutil.copytree(written, tmp_path / "out")
    partial = shutil.copytree(out / "checkpoints/4", out / "checkpoints/6.orbax-checkpoint-tmp")
    (partial / "_CHECKPOINT_METADATA").unlink(missing_ok=True)
    assert int(resumed(out, config)[0].step) == 4
    assert not partial.exists()


class Renamed(transformer.MLP):
    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.pre_norm = self.norm
        del self.norm


@pytest.mark.claim("refuses-to")
def test_a_renamed_parameter_and_another_optimizer_are_named(written, config, monkeypatch):
    with monkeypatch.context() as fork:
        fork.setattr(transformer, "MLP", Renamed)
        lost, new, last = refused(written, config).splitlines()
    theirs, ours = (f"params/layers/mlp/{name}/scale_D/value" for name in ("norm", "pre_norm"))
    assert lost == f"{theirs}: the checkpoint has it, the program does not; the nearest is {ours}"
    assert new == f"{ours}: the program has it, the checkpoint does not; the nearest is {theirs}"
    assert str(written / "checkpoints/4") in last
    monkeypatch.setattr("models.step.adamw", lambda train: optax.sgd(0.1))
    assert "optimizer/1/0/count: the checkpoint has it, the program does not" in refused(written, config)


@pytest.mark.claim("refuses-to")
def test_another_model_or_other_data_is_refused_and_the_rest_may_change(written, config, tmp_path):
    changed = lambda section, **values: replace(config, **{section: replace(getattr(config, section), **values)})
    assert "model.d_ff = 32: it was 16" in refused(written, changed("model", d_ff=32))
    assert "train.seed = 1: it was 0" in refused(written, changed("train", seed=1))
    assert "data.valid_fraction = 0.3: it was 0.2" in refused(written, changed("data", valid_fraction=0.3))
    folder = shutil.copytree(Path(config.data.path).parent, tmp_path / "elsewhere")
    moved = changed("data", path=f"{folder}/*.txt")
    assert int(resumed(written, moved)[0].step) == 4
    (folder / "7.txt").write_text("more")
    assert "the files were others" in refused(written, moved)
    assert int(resumed(written, changed("train", steps=9, learning_rate=1.0, eval_every=3))[0].step) == 4


def test_a_checkpoint_of_0_1_is_refused_in_one_sentence(written, config, tmp_path):
    out = shutil.copytree(written, tmp_path / "out")
    file = out / "checkpoints/4/origin/metadata"
    old = {key: value for key, value in json.loads(file.read_text()).items() if key in ("step", "config")}
    file.write_text(json.dumps(old | {"data": {}}))
    assert "was written by another version, which can continue it" in refused(out, config)


@pytest.mark.claim("full-disk")
def test_a_save_that_fails_is_an_error_and_the_one_before_stays(written, config, tmp_path, monkeypatch):
    out = shutil.copytree(written, tmp_path / "out")
    made, source = opened(config)
    with pytest.raises(Exception, match="No space left"), checkpoints.open_manager(out) as manager:
        write = lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        monkeypatch.setattr("orbax.checkpoint._src.path.atomicity.AtomicRenameTemporaryPath.finalize", write)
        checkpoints.save(manager, 6, drawn(made, 6), config, source)
        manager.wait_until_finished()
    monkeypatch.undo()
    assert int(resumed(out, config)[0].step) == 4
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["2", "4"]
    assert jnp.isfinite(jax.tree.leaves(resumed(out, config)[0].params)[0]).all()
