"""Grouped tensors and grouped GEMMs: each backend against a float64 loop over groups, and a decision for each leaf."""

import copy
import dataclasses
import functools
import itertools
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import te_stand_in
from autodiff import gradient, in_a_loop, kept, saving
from common import (
    ROOT,
    assert_close,
    assert_same_bits,
    auto_mesh,
    needs_te,
    normal,
    on_cpu_and_gpu,
    policy,
    run,
    run_each,
)
from jax import lax
from jax.experimental.pallas import pallas_call

from jaxoffload import chain, checkpoint, residuals, scan, scope, tag
from jaxoffload._engine.jaxprs.walk import walk
from jaxoffload._tracing import Trial
from jaxoffload.grouped import GroupedTensor, _backend, chosen_backend, grouped_matmul, te
from jaxoffload.grouped._interface import column_wise, row_wise, unbatched
from jaxoffload.grouped._ragged_fp8 import E4M3, RAGGED_FP8, from_columns, group_of

FLOAT, FP8 = jnp.float32, "float8_e4m3fn"
SIZES = np.array([3, 0, 7, 4], np.int32)


@pytest.fixture
def stand_in(monkeypatch):
    return te_stand_in.install(monkeypatch)


@pytest.fixture
def backend(request):
    """A backend's name; skips if the test needs the real TransformerEngine and it is missing."""
    if request.param.startswith("te stand-in"):
        request.getfixturevalue("stand_in")(v2=request.param.endswith("V2"))
        return "te"
    if request.param == "te":
        needs_te()
    return request.param


gpu = lambda name: pytest.param(name, marks=pytest.mark.gpu, id=f"{name}-gpu")
PLAIN = pytest.mark.parametrize(
    "backend",
    ["ragged", "te stand-in", "te stand-in V2", gpu("ragged"), gpu("mosaic"), gpu("te")],
    indirect=True,
)
QUANTISED = pytest.mark.parametrize("backend", ["ragged", "te stand-in", gpu("ragged"), gpu("te")], indirect=True)


quantized = jax.jit(RAGGED_FP8.quantize, static_argnums=2)


# --- the reference


def loop(x, w, sizes, dy):
    """Return y, dx and dw in float64, computed group by group; the other rows are zero."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw, start = np.zeros((len(x), w.shape[2])), np.zeros_like(x), np.zeros_like(w), 0
    for g, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start := start + size)
        y[rows], dx[rows], dw[g] = x[rows] @ w[g], dy[rows] @ w[g].T, x[rows].T @ dy[rows]
    return y, dx, dw


@jax.jit(static_argnames=("backend", "quantize", "full"))
def grouped_vjp(x, w, sizes, dy, backend, quantize=None, full=False):
    f = lambda x, w: grouped_matmul(x, w, sizes, backend=backend, quantize=quantize, full=full)
    y, pull = jax.vjp(f, x, w)
    return y, *pull(dy)


def operands(M, K, N, G, dtype, sizes):
    """Return operands whose rows past all groups are large, so that any influence shows."""
    x, w, dy = normal(0, (M, K)), normal(1, (G, K, N)), normal(2, (M, N))
    past = jnp.arange(M)[:, None] >= sum(sizes)
    x, dy = (jnp.where(past, 1e3, a) for a in (x, dy))
    return x.astype(dtype), (w / K**0.5).astype(dtype), jnp.asarray(sizes, jnp.int32), dy.astype(dtype)


def errors(got, want):
    """Return the relative errors of y, dx and dw in the Frobenius norm."""
    gaps = (np.asarray(a, np.float64) - b for a, b in zip(got, want, strict=True))
    return np.array([np.linalg.norm(gap) / max(np.linalg.norm(b), 1e-9) for gap, b in zip(gaps, want, strict=True)])


CASES = {
    "uneven": (32, 16, 80, 64),
    "empty": (0, 112, 0, 80),
    "one": (192,),
    "all-in-one": (0, 0, 192, 0),
    "fewer": (16, 0, 96, 32),
    "none": (0, 0, 0, 0),
    "odd": (1, 100, 3, 85),
}


@pytest.mark.slow
@pytest.mark.claim("grouped-products")
@PLAIN
@pytest.mark.parametrize("dtype, bound, shape", [(jnp.float32, 2e-6, (20, 12)), (jnp.bfloat16, 4e-3, (192, 64))])
def test_grouped_gemms_equal_a_loop_over_groups(backend, dtype, bound, shape):
    if backend == "mosaic" and dtype == jnp.float32:
        pytest.skip("it refuses float32; tested below")
    if jax.default_backend() == "gpu" and dtype == jnp.float32:
        bound = 2e-3  # TF32; else at most sqrt(192) roundings, of as many terms
    for name, sizes in CASES.items():
        args = operands(192, *shape, len(sizes), dtype, sizes)
        got, want = grouped_vjp(*args, backend), loop(*args)
        assert [a.dtype for a in got] == [dtype] * 3
        assert (errors(got, want) < bound).all(), (name, errors(got, want))
        y, dx, dw = map(np.asarray, got)
        assert not y[sum(sizes) :].any() and not dx[sum(sizes) :].any(), name
        assert not dw[np.array(sizes) == 0].any(), name
        if sum(sizes) == 192:
            assert (errors(grouped_vjp(*args, backend, full=True), want) < bound).all(), name
            masked, full = run_each(
                [functools.partial(grouped_vjp, backend=backend, full=f) for f in (False, True)], *args
            )
            assert all(np.array_equal(a, b) for a, b in zip(masked, full, strict=True)), name


def test_ragged_ignores_even_what_is_not_finite_past_all_groups():
    x, w, sizes, dy = operands(14, 5, 6, 4, FLOAT, SIZES - [0, 0, 2, 0])
    past = jnp.arange(14)[:, None] >= sizes.sum()
    for quantize in (None, "fp8"):
        clean = grouped_vjp(x, w, sizes, dy, "ragged", quantize)
        spoiled = grouped_vjp(jnp.where(past, jnp.nan, x), w, sizes, jnp.where(past, jnp.inf, dy), "ragged", quantize)
        assert_same_bits([*map(np.asarray, spoiled)], [*map(np.asarray, clean)])


@pytest.mark.slow
@QUANTISED
def test_fp8_is_as_close_as_its_docstring_says(backend, dtype=jnp.bfloat16):
    for name, sizes in CASES.items():
        if backend == "te" and name == "odd":  # not multiples of 16
            continue
        args = operands(192, 64, 128, len(sizes), dtype, sizes)
        got, want = grouped_vjp(*args, backend, "fp8"), loop(*args)
        assert [a.dtype for a in got] == [dtype] * 3
        assert (errors(got, want) <= [0.04, 0.07, 0.07]).all(), (name, errors(got, want))
        y, dx, dw = map(np.asarray, got)
        assert not y[sum(sizes) :].any() and not dx[sum(sizes) :].any(), name
        assert not dw[np.array(sizes) == 0].any(), name


@pytest.mark.claim("fp8")
def test_fp8_multiplies_what_was_rounded_and_adds_in_float32():
    x, w, sizes, dy = operands(14, 32, 16, 4, FLOAT, SIZES)
    e5m2 = jnp.float8_e5m2
    back = lambda q: np.asarray(q.data, np.float64) * np.repeat(np.asarray(q.scale_inv, np.float64), SIZES)[:, None]
    rounded_w = jax.jit(RAGGED_FP8.weights)(w)[0]
    rounded_w = np.asarray(rounded_w.data, np.float64) * np.asarray(rounded_w.scale_inv, np.float64)[:, None, None]
    want = loop(back(quantized(x, sizes, E4M3)), rounded_w, SIZES, back(quantized(dy, sizes, e5m2)))
    assert (errors(grouped_vjp(x, w, sizes, dy, "ragged", "fp8"), want) < 1e-6).all()


@pytest.mark.gpu
def test_transformer_engines_fp8_is_the_emulations():
    needs_te()
    args = operands(192, 64, 128, 4, jnp.bfloat16, CASES["uneven"])
    got, want = grouped_vjp(*args, "te", "fp8"), grouped_vjp(*args, "ragged", "fp8")
    assert (errors(got, [np.asarray(a, np.float64) for a in want]) < 4e-3).all()


def test_quantised_groups_have_their_own_scale():
    x = jnp.concatenate([jnp.full((3, 2), 1e-3), jnp.full((7, 2), 50.0), jnp.zeros((4, 2)), jnp.full((2, 2), 9e9)])
    q = quantized(x, jnp.asarray(SIZES), E4M3)
    np.testing.assert_allclose(q.amax, [1e-3, 0, 50, 0], rtol=1e-6)
    np.testing.assert_allclose(q.scale_inv, [1e-3 / 448, 1, 50 / 448, 1], rtol=1e-6)
    assert q.data.dtype == E4M3 and (np.asarray(q.data, np.float32)[:10] == 448).all() and not q.data[10:].any()


def test_fp8_of_tiny_groups_is_finite_and_as_close():
    """The largest float8 over 1e-36, or over cotangents of 1e-35, is infinite in float32. The scales for 1e-34 are
    finite, but their product with the weights' scales underflows."""
    sizes, of_x, of_dy = CASES["uneven"], np.array([1, 1e-36, 1e-34, 1]), np.array([1e-35, 1, 1, 1])
    x, w, group_sizes, dy = operands(192, 64, 128, 4, FLOAT, sizes)
    of_rows = lambda factors: np.repeat(factors, sizes)[:, None]
    tiny = lambda rows, factors: jnp.asarray(rows * of_rows(factors), FLOAT)
    got = grouped_vjp(tiny(x, of_x), w, group_sizes, tiny(dy, of_dy), "ragged", "fp8")
    factors = (of_rows(of_x), of_rows(of_dy), (of_x * of_dy)[:, None, None])
    got = [np.asarray(a, np.float64) / factor for a, factor in zip(got, factors, strict=True)]
    assert (errors(got, loop(x, w, sizes, dy)) <= [0.04, 0.07, 0.07]).all()


# --- refusals


def raised(error, **changed):
    given = {"x": jnp.ones((128, 64), jnp.bfloat16), "w": jnp.ones((4, 64, 64), jnp.bfloat16)}
    given |= {"group_sizes": jnp.asarray(SIZES)} | changed
    with pytest.raises(error) as info:
        grouped_matmul(**given)
    return str(info.value)


NO_GROUPS = {"w": jnp.ones((0, 64, 64), jnp.bfloat16), "group_sizes": jnp.zeros(0, jnp.int32)}


@pytest.mark.parametrize(
    "changed, said",
    [
        ({"x": jnp.ones(3, jnp.bfloat16)}, "x: bfloat16[3] is not (M, K)"),
        ({"w": jnp.ones((64, 64), jnp.bfloat16)}, "w: bfloat16[64, 64] is not (G, K, N)"),
        ({"x": jnp.ones((8, 9), jnp.bfloat16)}, "x: bfloat16[8, 9] and w: bfloat16[4, 64, 64] differ in K"),
        ({"x": jnp.ones((8, 64))}, "x: float32[8, 64] and w: bfloat16[4, 64, 64] must have one dtype"),
        ({"group_sizes": jnp.ones(4)}, "group_sizes: float32[4]; w: bfloat16[4, 64, 64] needs int32[4]"),
        ({"group_sizes": jnp.ones(3, jnp.int32)}, "group_sizes: int32[3]; w: bfloat16[4, 64, 64] needs int32[4]"),
        ({"group_sizes": jnp.array([1, 2, -1, 0])}, "group_sizes: [1, 2, -1, 0]; none may be negative, and the sum"),
        ({"group_sizes": jnp.array([99, 2, 29, 0])}, "and the sum may not exceed 128"),
        ({"quantize": "int8"}, "quantize: 'int8'; allowed are None and 'fp8'"),
        ({"full": "no"}, "full: 'no'; allowed are True and False"),
        ({"backend": "TE"}, "backend: 'TE'; allowed are 'auto', 'ragged', 'mosaic', 'te'; the nearest is 'te'"),
        ({"backend": "mosiac"}, "backend: 'mosiac'; allowed are 'auto', 'ragged', 'mosaic', 'te'; the nearest is 'mos"),
        ({"full": True}, "full: True, but group_sizes: [3, 0, 7, 4] sum to 14 of 128 rows"),
        ({"quantize": "fp8"} | NO_GROUPS, "w: bfloat16[0, 64, 64]; FP8 needs G, K and N of at least 1"),
        ({"backend": "mosaic", "quantize": "fp8"}, "backend 'mosaic' has no FP8; allowed are 'ragged', 'te'"),
    ],
)
def test_wrong_arguments_are_named(changed, said):
    assert said in raised(ValueError, **changed)


@pytest.mark.parametrize(
    "backend, M, K, N, dtype, fp8, said",
    [
        ("mosaic", 128, 100, 64, jnp.bfloat16, None, "K = 100 is not a multiple of 64"),
        ("mosaic", 100, 64, 64, jnp.bfloat16, None, "M = 100 is not a multiple of 8"),
        ("mosaic", 32, 64, 64, jnp.bfloat16, None, "M = 32 is less than 64 rows"),
        ("mosaic", 128, 64, 64, FLOAT, None, "float32 operands; allowed are bfloat16 and float16"),
        ("te", 128, 72, 64, FLOAT, "fp8", "K = 72 is not a multiple of 16, which FP8 needs"),
        ("te", 128, 64, 64, FLOAT, "fp8", "group_sizes: [3, 0, 7, 4]; FP8 needs multiples of 16"),
    ],
)
def test_what_a_backend_cannot_do_names_the_number_and_the_multiple(backend, M, K, N, dtype, fp8, said):
    changed = {"x": jnp.ones((M, K), dtype), "w": jnp.ones((4, K, N), dtype), "backend": backend, "quantize": fp8}
    assert f"grouped_matmul: backend {backend!r} cannot do this: {said}" == raised(ValueError, **changed)


UPGRADE = "upgrade nvidia-cublas, or use another backend"


@pytest.mark.claim("who-multiplies")
@pytest.mark.parametrize(
    "K, N, dtype, cublas, said",
    [
        (20, 64, jnp.bfloat16, 130802, "K = 20 is not a multiple of 8, which its kernels for bfloat16 need"),
        (64, 12, jnp.bfloat16, 130801, "N = 12 is not a multiple of 8, which its kernels for bfloat16 need"),
        (64, 64, jnp.bfloat16, 130800, f"its kernels need cuBLAS 13.8.1, and this is 13.8.0: {UPGRADE}"),
        (64, 64, jnp.bfloat16, 130801, None),
        (20, 12, jnp.float32, 130100, None),  # V1
    ],
)
def test_what_v2_cannot_do_is_said_before_it_is_tried(stand_in, K, N, dtype, cublas, said):
    stand_in(v2=True, cublas=cublas)
    args = operands(192, K, N, 4, dtype, CASES["fewer"])
    if said is None:
        grouped_vjp(*args, "te")
    else:
        changed = {"x": args[0], "w": args[1], "group_sizes": args[2], "backend": "te"}
        assert f"grouped_matmul: backend 'te' cannot do this: {said}" == raised(ValueError, **changed)


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_without_transformer_engine_one_message_names_the_extra(monkeypatch, quantize):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    sizes = jnp.full(4, 16, jnp.int32)
    said = raised(ImportError, backend="te", quantize=quantize, group_sizes=sizes)
    assert said.startswith("grouped_matmul: backend 'te' needs TransformerEngine, which cannot be imported (")
    assert "): install the extra jaxoffload[te], or with CUDA 13 jaxoffload[te-cuda13]" in said and "\n" not in said


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Pretend that this version of TransformerEngine is installed."""

    def install(version):
        folder = tmp_path / f"transformer_engine-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


@pytest.mark.parametrize("version", ["2.15.0", "2.20.0.dev0+d0067d0"])
def test_a_newer_transformer_engine_is_taken(stand_in, installed, version):
    installed(version)
    assert te.importable()


@pytest.mark.parametrize("version", ["2.9", "2.14.1"])
def test_a_transformer_engine_that_is_too_old_is_not_used_and_one_message_says_so(stand_in, installed, version):
    installed(version)
    assert not te.importable()
    said = raised(ImportError, backend="te")
    assert said == (
        f"grouped_matmul: backend 'te': TransformerEngine {version} is too old; must be at least 2.15, as the extra "
        "jaxoffload[te] installs it, or with CUDA 13 jaxoffload[te-cuda13]"
    )


def test_the_extras_ask_for_the_transformer_engine_that_is_needed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("te", "te-cuda13"):
        (wanted,) = (line for line in extras["optional-dependencies"][name] if line.startswith("transformer-engine"))
        assert wanted.endswith(">=" + ".".join(map(str, te.NEEDED)))


def test_a_kernel_is_traced_once_for_all_policies_and_no_walk_enters_it():
    traced = []

    def kernel(x):
        traced.append(x)
        add_one = lambda ref, out: out.__setitem__(..., ref[...] + 1)
        return pallas_call(add_one, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    shared = unbatched("a backend", kernel)
    f = lambda x, w: scan(lambda x, w: (tag(shared(x), "y") * w, None), x, w, policy=policy(), strict=False)[0]
    for decision in ("save", "recompute"):
        trace = Trial(policy({"y": decision})).traced(jax.make_jaxpr(f))
        primitives = [site.eqn.primitive.name for site in walk(trace(jnp.ones((8, 128)), jnp.ones(3)))]
    assert len(traced) == 1
    assert "pallas_call" in primitives and not {"get", "swap"} & set(primitives)


@pytest.mark.parametrize("backend", ["ragged", "mosaic", "te stand-in"], indirect=True)
def test_second_derivatives_and_vmap_of_a_kernel_are_refused_in_one_message(backend, monkeypatch):
    monkeypatch.setattr(_backend, "_gpu_generation", lambda: 9)
    x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((4, 64, 64), jnp.bfloat16)
    for quantize in [None] if backend == "mosaic" else [None, "fp8"]:
        f = jax.jit(lambda x, q=quantize: grouped_matmul(x, w, jnp.full(4, 32), backend=backend, quantize=q))
        loss = lambda x, f=f: jnp.sum(f(x) ** 2)
        for twice in (jax.hessian(loss), jax.jacrev(jax.jacrev(loss)), jax.hessian(jax.checkpoint(loss))):
            said = r"^grouped_matmul cannot be differentiated twice.*jax\.lax\.ragged_dot"
            with pytest.raises(NotImplementedError, match=said):
                jax.eval_shape(twice, x)
    if backend != "ragged":
        with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot be vmapped; backend 'ragged' can"):
            jax.vmap(lambda x: grouped_matmul(x, w, jnp.asarray(SIZES), backend=backend))(jnp.stack([x, x]))


@pytest.mark.parametrize(
    "batched, quantize", [((0, None, None), None), ((None, 0, 0), None), ((0, 0, None), "fp8"), ((0, None, 0), None)]
)
def test_any_operands_of_ragged_may_be_batched(batched, quantize):
    """So may their gradients: per example, with weights for all."""
    args = normal(0, (14, 5)), normal(1, (4, 5, 6)), jnp.asarray(SIZES)
    stacks = [jnp.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip(args, batched, strict=True)]
    f = lambda x, w, sizes: grouped_matmul(x, w, sizes, backend="ragged", quantize=quantize)
    both = lambda x, w, sizes: (f(x, w, sizes), gradient(lambda x, w: f(x, w, sizes), (0, 1))(x, w))
    got = jax.jit(jax.vmap(both, batched))(*stacks)
    for row in range(2):
        want = jax.jit(both)(*(a[row] if axis == 0 else a for a, axis in zip(stacks, batched, strict=True)))
        assert_close(jax.tree.map(lambda a: a[row], got), want)


# --- auto


class Hopper:
    compute_capability, core_count, platform = "9.0", 132, "gpu"


class Blackwell(Hopper):
    compute_capability = "10.0"


class Radeon(Hopper):
    compute_capability = "gfx942"


BF16 = jnp.bfloat16


@pytest.mark.claim("who-multiplies")
@pytest.mark.parametrize(
    "device, K, dtype, quantize, without_te, with_v1, with_v2",
    [
        (Hopper, 64, BF16, None, "mosaic", "mosaic", "te"),
        (Hopper, 48, BF16, None, "ragged", "te", "te"),
        (Hopper, 44, BF16, None, "ragged", "te", "ragged"),
        (Hopper, 64, BF16, "fp8", "ragged", "te", "te"),
        (Hopper, 40, BF16, "fp8", "ragged", "ragged", "ragged"),
        (Blackwell, 64, BF16, None, "ragged", "te", "te"),  # without wgmma
        (Radeon, 64, BF16, None, "ragged", "ragged", "ragged"),
    ],
)
def test_auto_takes_the_best_that_can(request, monkeypatch, device, K, dtype, quantize, without_te, with_v1, with_v2):
    x, w = jax.ShapeDtypeStruct((128, K), dtype), jax.ShapeDtypeStruct((4, K, 64), dtype)
    monkeypatch.setattr(jax, "devices", lambda: [device()])
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert chosen_backend(x, w, quantize=quantize) == without_te
    choose = request.getfixturevalue("stand_in")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert chosen_backend(x, w, quantize=quantize) == with_v1
    choose(v2=True)
    assert chosen_backend(x, w, quantize=quantize) == with_v2
    choose(v2=True, cublas=130800)  # too old for it
    assert chosen_backend(x, w, quantize=quantize) == (without_te if dtype == BF16 and not quantize else with_v2)
    choose(v2=True)
    request.getfixturevalue("installed")("2.14.1")  # too old
    assert chosen_backend(x, w, quantize=quantize) == without_te


@pytest.mark.claim("who-multiplies")
@pytest.mark.parametrize(
    "quantize, v2, otherwise", [(None, True, "mosaic"), ("fp8", True, "ragged"), ("fp8", False, "ragged")]
)
def test_auto_leaves_to_xla_what_transformer_engine_cannot_divide(stand_in, monkeypatch, quantize, v2, otherwise):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    x, w = jnp.ones((128, 64), BF16), jnp.ones((4, 64, 64), BF16)
    monkeypatch.setattr(jax, "devices", lambda real=jax.devices: [Hopper()])
    auto, manual = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Manual
    stand_in(v2=v2)
    assert chosen_backend(x, w, quantize=quantize) == otherwise  # there are 8 devices
    for kinds, chosen in (((auto, auto), otherwise), ((manual, auto), otherwise), ((manual, manual), "te")):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((4, 2), ("d", "t"), axis_types=kinds)):
            assert chosen_backend(x, w, quantize=quantize) == chosen
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert chosen_backend(x, w, quantize=quantize) == "te"


@pytest.fixture
def on_mesh_of():
    """Trace as on one device of a mesh of this size."""
    manual = jax.sharding.AxisType.Manual
    mesh = lambda devices: jax.sharding.AbstractMesh((devices,), ("d",), axis_types=(manual,))
    return lambda devices: jax.sharding.use_abstract_mesh(mesh(devices))


@pytest.mark.slow
@pytest.mark.claim("one-gpu-of-a-process")
@pytest.mark.parametrize("quantize, v2", [(None, False), (None, True), ("fp8", True)])
def test_kernels_that_serve_one_gpu_of_a_process_are_refused_on_several(
    stand_in, monkeypatch, on_mesh_of, quantize, v2
):
    monkeypatch.setattr(jax, "devices", lambda *args, real=jax.devices: real(*args) if args else [Hopper()])
    stand_in(v2=v2)
    args = {"x": jnp.ones((128, 48), BF16), "w": jnp.ones((4, 48, 64), BF16), "quantize": quantize}
    given = args | {"group_sizes": jnp.array([32, 32, 48, 16], jnp.int32), "backend": "te"}

    def serves(devices):
        with on_mesh_of(devices):
            if chosen_backend(**args) == "te":
                jax.eval_shape(lambda x: grouped_matmul(**given | {"x": x}), args["x"])
                return True
            for weights in (args["w"], [args["w"]] * 2):
                assert raised(ValueError, **given | {"w": weights}) == (
                    "grouped_matmul: backend 'te' cannot do this: its kernels for these operands support only one GPU "
                    "per process, and this process has 8: start one process per GPU, or use another backend"
                )
            return False

    # There are 8 devices. 16 are those of another machine, which this table describes.
    assert [serves(devices) for devices in (1, 8, 16)] == [True, v2 and quantize is None, True]
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert serves(8)


def test_operands_that_are_sharded_over_explicit_axes_are_refused():
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices()[:2])  # JAX makes explicit axes by default
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((16, 4)), jax.P("d"))
        with pytest.raises(ValueError, match=r"grouped_matmul: x: .* over explicit axes; call it in a jax\.shard_map"):
            grouped_matmul(x, jnp.ones((2, 4, 4)), jnp.array([8, 8], jnp.int32))


@pytest.mark.parametrize("M, K, N, dtype", [(64, 64, 64, jnp.float16), (104, 192, 128, BF16)])
def test_mosaic_lowers_for_the_shapes_it_does_not_refuse(monkeypatch, M, K, N, dtype):
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *args: [Hopper()] if not args else devices(*args))
    shaped = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((M, K), (3, K, N), (M, N))]
    traced = grouped_vjp.trace(*shaped[:2], jax.ShapeDtypeStruct((3,), jnp.int32), shaped[2], "mosaic")
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu") == 3


# --- GroupedTensor


def grouped(columnwise=True):
    q = quantized(normal(0, (14, 3)), jnp.asarray(SIZES), E4M3)
    return q if columnwise else dataclasses.replace(q, columnwise_data=None, columnwise_scale_inv=None, amax=None)


def test_a_grouped_tensor_passes_through_transformations():
    t = grouped()
    bits = lambda t: [np.asarray(x) for x in jax.tree.leaves(t)]
    out = jax.eval_shape(lambda t: t, t)
    assert isinstance(out, GroupedTensor) and out.data == jax.ShapeDtypeStruct((14, 3), E4M3)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), t, t)
    for rows in (jax.vmap(lambda t: t)(stacked), lax.scan(lambda c, t: (c, t), 0, stacked)[1]):
        assert isinstance(rows, GroupedTensor) and rows.data.shape == (2, 14, 3)
        assert_same_bits(bits(jax.tree.map(lambda x: x[1], rows)), bits(t))


def test_a_fields_error_names_it_its_value_and_what_is_allowed():
    t, ones = grouped(), jnp.ones
    wrong = {
        "data: None is not an array": {"data": None},
        "data: float32[3], but it must be (M, K)": {"data": ones(3)},
        "group_sizes: float32[4], but it must be int32 of shape (G,)": {"group_sizes": ones(4)},
        "group_sizes: int32[2, 2], but": {"group_sizes": ones((2, 2), jnp.int32)},
        "scale_inv: None, but float8_e4m3fn data need one": {"scale_inv": None},
        "scale_inv: float32[4], but float32 data have none; columnwise_data": {"data": ones((14, 3))},
        "scale_inv: float32[3], but it must be float32[4]": {"scale_inv": ones(3)},
        "scale_inv: bfloat16[4], but it must be float32[4]": {"scale_inv": ones(4, jnp.bfloat16)},
        "columnwise_scale_inv: None, but columnwise_data is float8_e4m3fn[3, 14]: both": {"columnwise_scale_inv": None},
        "columnwise_scale_inv: float32[4], but columnwise_data is None: both": {"columnwise_data": None},
        "columnwise_data: float8_e4m3fn[14, 3], but it must be float8_e4m3fn[3, 14]": {"columnwise_data": t.data},
        "columnwise_data: float32[3, 14], but": {"columnwise_data": ones((3, 14))},
        "amax: float32[1], but it must be float32[4]": {"amax": ones(1)},
        "amax: 3 is not an array": {"amax": 3},
    }
    for said, changed in wrong.items():
        with pytest.raises(ValueError) as error:
            dataclasses.replace(t, **changed)
        assert said in str(error.value) and str(error.value).startswith("GroupedTensor: "), str(error.value)


def changed(tensor, **fields):
    tensor = copy.copy(tensor)
    vars(tensor).update(fields)
    return tensor


def to_te(x, columnwise=False):
    """TransformerEngine's tensor of the same buffers, as its grouped GEMM gets it."""
    if x.scale_inv is None:
        return te._plain(x.data, x.group_sizes)
    made = te._scaled(column_wise(x) if columnwise else row_wise(x), jnp.float16, columnwise)
    return changed(made, amax=te._packed(x.amax, x.group_sizes))


def test_transformer_engines_tensors_are_the_same_buffers(stand_in):
    plain = GroupedTensor(normal(0, (14, 3)), jnp.asarray(SIZES))
    there = to_te(plain)
    assert (
        isinstance(there, te_stand_in.GroupedNoScaleTensor) and there.original_shape == (14, 3) and there.amax is None
    )
    assert jax.tree.structure(te.from_te(there)) == jax.tree.structure(plain)
    q = grouped()
    others = jnp.where(SIZES > 0, 2 * q.columnwise_scale_inv, 1)  # those of an empty group are not packed
    q = dataclasses.replace(q, columnwise_scale_inv=others)
    rows, columns = to_te(q), to_te(q, columnwise=True)
    assert isinstance(rows, te_stand_in.GroupedScaledTensor1x) and rows.dq_dtype == jnp.float16
    assert (rows.original_shape, columns.original_shape) == ((14, 3), (3, 14))
    assert_same_bits([np.asarray(columns.values())], [2 * np.asarray(rows.values())])
    back = te.from_te(rows, columns)
    assert jax.tree.structure(back) == jax.tree.structure(q)
    assert_same_bits([np.asarray(x) for x in jax.tree.leaves(back)], [np.asarray(x) for x in jax.tree.leaves(q)])
    assert te.from_te(rows).columnwise_data is None
    assert te.from_te(changed(rows, amax=jnp.ones(1))).amax is None


def test_tensors_of_transformer_engine_that_are_not_a_pair_are_refused(stand_in):
    q = grouped()
    rows, columns = to_te(q), to_te(q, columnwise=True)
    wrong = {
        "rowwise: GroupedScaledTensor1x without group sizes": (changed(rows, first_dims=None),),
        "rowwise: GroupedScaledTensor1x, which is column-wise": (columns,),
        "columnwise: GroupedScaledTensor1x, which is row-wise": (rows, rows),
        "columnwise: group sizes [7, 0, 3, 4], but rowwise's are [3, 0, 7, 4]": (
            rows,
            changed(columns, first_dims=jnp.array([7, 0, 3, 4], jnp.int32)),
        ),
        "columnwise: 2 group sizes, but rowwise has 4": (
            rows,
            changed(columns, first_dims=jnp.array([7, 7], jnp.int32), scale_inv=jnp.ones(2)),
        ),
        "rowwise: GroupedScaledTensor1x with (64,) scales, not one for each of 4 groups": (  # as if scaled per block
            changed(rows, scale_inv=jnp.ones(64)),
        ),
        "columnwise: GroupedScaledTensor1x with column counts (last_dims)": (
            rows,
            changed(columns, last_dims=jnp.ones(4, jnp.int32)),
        ),
    }
    for said, given in wrong.items():
        with pytest.raises(ValueError) as error:
            te.from_te(*given)
        assert str(error.value).startswith(f"from_te: {said}"), str(error.value)
        assert "; allowed are a GroupedNoScaleTensor, or a row-wise GroupedScaledTensor1x alone or" in str(error.value)
    same = changed(columns, first_dims=jnp.asarray(SIZES + 0))
    assert te.from_te(rows, same).columnwise_data is not None
    assert jax.eval_shape(te.from_te, rows, same).columnwise_data is not None  # without values


def test_the_import_leaves_jaxs_lowerings_alone_until_float8_is_used():
    """In a separate process, because this one may have used float8 already."""
    program = """
import jax, jax.numpy as jnp
import jaxoffload
kept = lambda: "reduce_precision" in jax.jit(lambda x: jax.lax.reduce_precision(x, 4, 3)).lower(x).as_text()
x = jnp.ones(2, jnp.float8_e4m3fn)
jaxoffload.tag(jnp.ones(2), "x")
jaxoffload.grouped.GroupedTensor(jnp.ones((2, 1)), jnp.array([2], jnp.int32))
assert kept()
jaxoffload.tag(x, "x")
assert not kept()
x = jnp.ones(2)
assert kept()
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("dtype", [E4M3, jnp.float8_e5m2])
def test_jax_checkpoint_keeps_the_bits_of_every_float8(dtype):
    """JAX's own lowering turns values that an IEEE format of 4 and 3 bits lacks into NaN or zero."""
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    x = jnp.where(jnp.isfinite(every), every, jnp.zeros((), dtype)).astype(FLOAT)

    def f(x, w):
        q = tag(lax.stop_gradient(x).astype(dtype), "q").astype(FLOAT)
        return jnp.sin(q * w)

    w = jnp.ones(256)
    for g in (jax.checkpoint(f, policy=saving("q")), checkpoint(f, policy=policy({"q": "offload"}))):
        assert_same_bits(*run_each([g, f], x, w))
        assert_same_bits(*run_each([gradient(g, 1), gradient(f, 1)], x, w))


# --- a decision for each leaf

LEAVES = {
    "data": (FP8, (14, 8)),
    "scale_inv": ("float32", (4,)),
    "columnwise_data": (FP8, (8, 14)),
    "columnwise_scale_inv": ("float32", (4,)),
    "amax": ("float32", (4,)),
}
LAYERS = 3
NAMES = [f"moe/fc1.{leaf}" for leaf in (*LEAVES, "group_sizes")]
X, SIZES_J = normal(0, (14, 8)), jnp.asarray(SIZES)
WEIGHTS = {k: normal(i, (LAYERS, 14, 8)) for i, k in enumerate("abc", 1)}


def layer(x, w):
    """A layer whose backward pass reads each leaf of a quantised tensor."""
    with scope("moe"):
        t = tag(RAGGED_FP8.quantize(lax.stop_gradient(x), SIZES_J, E4M3), "fc1")
    group = group_of(jnp.arange(14), t.group_sizes)
    rows = t.data.astype(FLOAT) * t.scale_inv[group][:, None] * w["a"]
    columns = from_columns(t.columnwise_data, t.group_sizes).astype(FLOAT) * t.columnwise_scale_inv[group][:, None]
    return x + jnp.sin(rows) + jnp.cos(columns * w["b"]) * (t.amax[group][:, None] * w["c"])


def layers(w):
    return [jax.tree.map(lambda a: a[i], w) for i in range(LAYERS)]


def through(kind, f, rules, **fields):
    """Run `f` in three layers under a policy; `checkpoint` runs one call per layer."""
    resident = {} if kind == "checkpoint" else {"resident_layers": 0}
    p = policy({f"moe/{name}": how for name, how in rules.items()}, **resident, **fields)
    if kind == "scan":
        return lambda x, w: scan(lambda x, w: (f(x, w), None), x, w, policy=p)[0]
    if kind == "chain":
        return lambda x, w: chain([f] * LAYERS, x, layers(w), policy=p)
    return lambda x, w: checkpoint(f, policy=p)(x, layers(w)[0])


def reference(kind, f, *names):
    """Plain JAX that saves these names."""
    if kind == "scan":
        return lambda x, w: lax.scan(lambda x, w: (in_a_loop(f, *names)(x, w), None), x, w)[0]
    saved = jax.checkpoint(f, policy=saving(*names))
    if kind == "checkpoint":
        return lambda x, w: saved(x, layers(w)[0])

    def chained(x, w):
        for one in layers(w):
            x = saved(x, one)
        return x

    return chained


def assert_all_equal(kind, f, every, args, *saved):
    fs = [reference(kind, f, *saved), *(through(kind, f, rules) for rules in every)]
    want, *grads = run_each([gradient(f, (0, 1)) for f in fs], *args)
    for rules, got in zip(every, grads, strict=True):
        try:
            assert_same_bits(got, want)
        except AssertionError as differs:
            raise AssertionError(f"{rules}: {differs}") from None


DECISIONS = ("save", "offload", "recompute")


@pytest.mark.slow
@pytest.mark.claim("grouped-tensor")
@on_cpu_and_gpu
@pytest.mark.parametrize("kind", ["checkpoint", "scan", pytest.param("chain", marks=pytest.mark.long)])
def test_any_leaf_offloaded_saved_or_recomputed_comes_back(kind, device):
    """Eleven of the 243 assignments, in which any two leaves have all nine pairs of decisions."""
    some = list(itertools.product(DECISIONS, repeat=5))[11::22]
    assert all(len({(row[i], row[j]) for row in some}) == 9 for i, j in itertools.combinations(range(5), 2))
    every = [{f"fc1.{leaf}": how for leaf, how in zip(LEAVES, row, strict=True)} for row in some]
    assert_all_equal(kind, layer, every[:: 3 if (kind, device) == ("chain", "gpu") else 1], (X, WEIGHTS), *NAMES)


MIXED = [("save", "recompute"), ("recompute", "offload")]


def unquantised(x, w):
    """A layer whose backward pass reads the bfloat16 data and the sizes."""
    with scope("moe"):
        t = tag(GroupedTensor((x * w["a"]).astype(jnp.bfloat16), SIZES_J), "fc1")
    group = group_of(jnp.arange(14), t.group_sizes).astype(FLOAT)
    return x + jnp.sin(t.data.astype(FLOAT) * w["b"]) * group[:, None]


@pytest.mark.parametrize("kind", ["checkpoint", "scan", "chain"])
def test_a_grouped_tensor_of_bfloat16_comes_back(kind):
    """Fields that it lacks are not leaves. Its sizes are integers, hence saved."""
    whole = [{"fc1": how} for how in DECISIONS]
    every = [*whole, {"fc1.data": "save"}, *({"fc1": others, "fc1.data": how} for others, how in MIXED)]
    assert_all_equal(kind, unquantised, every, (X, WEIGHTS), "moe/fc1.data", "moe/fc1.group_sizes")
    moved = kept(through(kind, unquantised, {"fc1": "offload"}), X, WEIGHTS)
    assert {dtype for place, dtype, _ in moved if place == "host"} == {"bfloat16"}


@pytest.mark.claim("grouped-tensor")
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("kind", ["checkpoint", "scan", "chain"])
def test_the_host_holds_that_leaf_and_no_other(kind, leaf):
    held = kept(through(kind, layer, {"fc1": "save", f"fc1.{leaf}": "offload"}), X, WEIGHTS)
    host = {(dtype, shape): n for (place, dtype, shape), n in held.items() if place == "host"}
    dtype, shape = LEAVES[leaf]
    lead = {"checkpoint": {(): 1}, "chain": {(): LAYERS}, "scan": {(): 1, (LAYERS,): 1}}[kind]
    assert host == {(dtype, (*k, *shape)): n for k, n in lead.items()}


# --- grouped_matmul in a layer

W = normal(1, (LAYERS, 4, 8, 8)) * 0.5
SHAPES = {"data": (14, 8), "scale_inv": (4,), "columnwise_data": (8, 14), "columnwise_scale_inv": (4,)}


def expert(x, w, quantize="fp8"):
    """A layer whose grouped GEMM, unless kept, is recomputed from the row-wise copy."""
    with scope("moe"):
        y = grouped_matmul(x, w, SIZES_J, backend="ragged", quantize=quantize, name="fc1_input")
        return x + jnp.sin(tag(y, "fc1"))


def plain(x, w):
    return expert(x, w, None)


def test_the_quantised_copies_have_their_names_in_the_scope_of_the_call():
    def loss(x, w):
        with scope("outer"):  # the scope counts where the layer is called, not where it is differentiated
            return checkpoint(expert, policy=policy(default="save"))(x, w)

    names = {name for row in residuals(loss, X, W[0]).rows for name in row.names}
    fields = [f.name for f in dataclasses.fields(GroupedTensor)]
    assert names == {"outer/moe/fc1", *(f"outer/moe/fc1_input.{field}" for field in fields)}
    saved = jax.checkpoint(loss, policy=saving("outer/moe/fc1_input.columnwise_data"))
    assert ("device", FP8, (8, 14)) in kept(saved, X, W[0])  # and JAX sees the same names


def test_a_plain_grouped_gemms_residuals_are_its_arguments():
    f = lambda x, w: grouped_matmul(jnp.sin(x), w, SIZES_J, backend="ragged", name="moe/fc1_input")
    at = lambda how: kept(checkpoint(f, policy=policy({"moe/fc1_input": how})), X, W[0])
    assert at("offload") == {("host", "float32", (14, 8)): 1}
    assert at("save") == {("device", "float32", (14, 8)): 1}
    assert at("recompute") == {}


@pytest.mark.slow
@on_cpu_and_gpu
@pytest.mark.parametrize(
    "kind", ["scan", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("checkpoint", "chain"))]
)
def test_quantised_residuals_saved_offloaded_or_recomputed_give_the_same_bits(kind, device):
    """Where the grouped GEMM is recomputed, the backward pass reads both copies."""
    every = [{"fc1_input": "offload", "fc1": "save"}]
    every += [{"fc1_input": how, "fc1": "recompute"} for how in DECISIONS]
    if kind == "checkpoint":
        one = {"fc1": "recompute", "fc1_input": "recompute"}
        every += [one | {f"fc1_input.{leaf}": "offload"} for leaf in ("scale_inv", "columnwise_data")]
    saved = [*(f"moe/fc1_input.{leaf}" for leaf in SHAPES), "moe/fc1"]
    want = run(gradient(reference(kind, expert, *saved), (0, 1)), X, W)
    for rules in every[:: 2 if kind == "chain" else 1]:  # one program each: in a joint program XLA merges their matmuls
        assert_same_bits(run(gradient(through(kind, expert, rules), (0, 1)), X, W), want)


def test_only_what_the_backward_pass_reads_is_kept():
    host = lambda **rules: {
        (dtype, shape)
        for (place, dtype, shape), _ in kept(through("checkpoint", expert, rules), X, W).items()
        if place == "host"
    }
    columns, rows = {(FP8, (8, 14)), ("float32", (4,))}, {(FP8, (14, 8)), ("float32", (4,))}
    assert host(fc1_input="offload", fc1="save") == columns
    assert host(fc1_input="offload", fc1="recompute") == columns | rows


@pytest.mark.parametrize("check, quantize", [(True, None), (False, "fp8")])
def test_in_shard_map_the_weights_cotangents_are_summed(check, quantize):
    mesh = auto_mesh(data=2)
    spec, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    f = lambda x, w: grouped_matmul(x, w, SIZES_J, backend="ragged", quantize=quantize)
    x, w = normal(0, (28, 8)), W[0]
    local = jax.shard_map(f, mesh=mesh, in_specs=(spec, whole), out_specs=spec, check_vma=check)
    apart = lambda x, w: jnp.concatenate([f(x[:14], w), f(x[14:], w)])
    got, want = (jax.jit(gradient(g, (0, 1)))(x, w) for g in (local, apart))
    assert_close(got, want)
