"""The pinned host pool's size: what XLA reads from its environment variables, or an error of one line."""

import jax
import jax.numpy as jnp
import pytest
from autodiff import gradient
from common import normal, policy

from jaxoffload import checkpoint, tag
from jaxoffload._engine.host.limit import host_pool_bytes

POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
X, W = normal(0, (4, 8)), normal(1, (8, 8))


@pytest.mark.parametrize(
    "limit", ["much", "1GiB", "inf", "nan", "-inf", "-4", "-0.5", "0", "0.0", "1e300", "8589934592", "9" * 400]
)
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_pool_size_that_is_invalid_is_named(monkeypatch, limit, backend):
    monkeypatch.setenv(POOL, limit)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with pytest.raises(ValueError, match=rf"^{POOL}: '{limit}' is not a number of GiB above 0, such as 64"):
        f = checkpoint(lambda x, w: jnp.sin(tag(x @ w, "fc1")), policy=policy({"fc1": "offload"}))
        jax.make_jaxpr(gradient(f))(X, W)


@pytest.mark.parametrize("limit", ["0.5", "1e2", "64.0"])
def test_xla_reads_only_whole_numbers(monkeypatch, limit):
    monkeypatch.setenv(POOL, limit)
    assert host_pool_bytes() == float(limit) * 2**30  # of another machine
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match=f"'{limit}' is not a whole number of GiB, such as 64; XLA would ignore it"):
        host_pool_bytes()


@pytest.mark.parametrize(
    "limit, ahead, pool",
    [(None, None, 64), ("", None, 64), (None, "true", 16), (None, "0", 64), ("100", "true", 100), (" 8 ", None, 8)],
)
def test_the_pool_is_what_xla_makes_of_its_variables(monkeypatch, limit, ahead, pool):
    for name, value in ((POOL, limit), ("XLA_PJRT_GPU_HOST_MEMORY_PREALLOCATE", ahead)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert host_pool_bytes() == (pool * 2**30 if limit and limit.strip() else None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert host_pool_bytes() == pool * 2**30
