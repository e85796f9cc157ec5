"""The host pool, the compiler's options, and versions that are refused."""

import jax
import jax.numpy as jnp
import jaxlib
import pytest
from common import gradient, kept_bytes, normal, policy

from jaxoffload import checkpoint, compiler_options, residuals, scan, tag

N, ONE = 6, 4 * 8 * 4  # layers; bytes of a float32 (4, 8)
X, WS = normal(0, (4, 8)), normal(1, (N, 8, 8))


def body(x, w):
    return jnp.sin(tag(x @ w, "fc1")), None


def stack(**fields):
    rules = policy({"fc1": "offload"}, **{"resident_layers": 0, **fields})
    return lambda x, w: scan(body, x, w, policy=rules)[0]


@pytest.fixture
def pool(monkeypatch):
    """Sets the pinned host pool, in bytes for the whole of the 8 devices that an unsharded trace assumes."""

    def set_bytes(n):
        monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(n / jax.device_count() / 2**30))

    return set_bytes


def test_a_pool_that_holds_the_need_changes_nothing(pool):
    pool(N * ONE)
    assert kept_bytes(stack(), X, WS)[1] == N * ONE


def test_a_pool_that_is_too_small_is_an_error_before_anything_is_compiled(pool):
    pool(N * ONE - 8)
    with pytest.raises(MemoryError, match=r"scan: 6 layer\(s\).*offload_layers: 5.*on_host_full: save"):
        jax.make_jaxpr(gradient(stack()))(X, WS)
    with pytest.raises(MemoryError, match=r"checkpoint: 1 layer\(s\)"):
        pool(ONE - 8)
        one = checkpoint(lambda x, w: body(x, w)[0], policy=policy({"fc1": "offload"}))
        jax.make_jaxpr(gradient(one))(X, WS[0])


def test_on_host_full_save_offloads_fewer_layers_with_one_warning(pool):
    pool(4 * ONE)
    f = stack(on_host_full="save")
    with pytest.warns(UserWarning, match="enough for 4") as seen:
        table = residuals(f, X, WS)
    assert len(seen) == 1
    assert table.host_bytes == 4 * ONE
    assert [r.layers for r in table if r.reason == "other_layers"] == [2]


def test_on_host_full_save_keeps_a_checkpoint_on_the_device(pool):
    pool(ONE - 8)
    one = checkpoint(lambda x, w: body(x, w)[0], policy=policy({"fc1": "offload"}, on_host_full="save"))
    with pytest.warns(UserWarning, match="enough for 0"):
        assert kept_bytes(one, X, WS[0]) == (ONE, 0)


def test_what_the_backward_pass_does_not_need_takes_no_room(pool):
    pool(N * ONE)

    def step(x, w):
        return x + tag(jnp.sin(tag(x @ w, "fc1")) @ w, "fc2"), None

    f = lambda x, w: scan(step, x, w, policy=policy({"fc1": "offload", "fc2": "offload"}, resident_layers=0))[0]
    assert kept_bytes(f, X, WS)[1] == N * ONE


def test_inside_shard_map_the_sizes_are_a_devices_own(monkeypatch):
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.P
    f = jax.shard_map(stack(), mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    limit = lambda n: monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(n / 2**30))
    limit(N * ONE // 4)
    jax.make_jaxpr(gradient(f))(X, WS)
    limit(N * ONE // 4 - 1)
    with pytest.raises(MemoryError):
        jax.make_jaxpr(gradient(f))(X, WS)


def test_compiler_options_are_xlas_on_gpu_and_empty_on_cpu():
    assert compiler_options() == compiler_options("cpu") == {}
    options = compiler_options("gpu")
    assert options["xla_gpu_enable_command_buffer"] == ""
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert compiler_options("gpu") is not compiler_options("gpu")  # a caller may change its own


@pytest.mark.gpu
def test_compiler_options_are_accepted_and_the_plan_frees_what_it_moves():
    """XLA's own account: device temporaries fall by the residuals, which are host temporaries instead."""
    x, w = normal(0, (4096, 1024)), normal(1, (N, 1024, 1024))
    size = 4096 * 1024 * 4

    def memory(decision):
        rules = policy({"fc1": decision}, resident_layers=0)
        f = gradient(lambda x, w: scan(body, x, w, policy=rules)[0], (0, 1))
        return jax.jit(f, compiler_options=compiler_options()).lower(x, w).compile().memory_analysis()

    saved, offloaded = memory("save"), memory("offload")
    assert offloaded.host_temp_size_in_bytes == N * size and saved.host_temp_size_in_bytes == 0
    freed = saved.temp_size_in_bytes - offloaded.temp_size_in_bytes
    # Less one or two buffers in flight, which double buffering and the copies hold.
    assert (N - 3) * size <= freed <= N * size + 2**16  # buffers are aligned


def test_a_gpu_with_a_jaxlib_that_returns_wrong_gradients_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for version, refused in (("0.10.2", True), ("0.11.1", True), ("0.11.2", False), ("0.12.0.1", False)):
        monkeypatch.setattr(jaxlib, "__version__", version)
        if refused:
            with pytest.raises(NotImplementedError, match=rf"jaxlib {version} .*install jaxlib >= 0.11.2"):
                _fresh()
        else:
            _fresh()


def _fresh():
    """Traces a body of its own, for what was traced before is remembered."""
    rules = policy({"fc1": "offload"}, resident_layers=0)
    f = lambda x, w: scan(lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None), x, w, policy=rules)[0]
    return jax.make_jaxpr(gradient(f))(X, WS)


def test_jax_remat3_is_refused(monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_remat3", True, raising=False)
    with pytest.raises(NotImplementedError, match=r"jax_remat3 is on.*jax.config.update"):
        _fresh()


def test_saving_needs_no_gate(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    f = lambda x, w: scan(lambda x, w: (jnp.sin(tag(x @ w, "fc1")), None), x, w, policy=policy({"fc1": "save"}))[0]
    jax.make_jaxpr(gradient(f))(X, WS)
