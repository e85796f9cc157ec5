"""`_jax.py` holds all that jaxoffload needs of JAX beyond its documented API, and this JAX has it."""

import ast
import importlib
import re
from pathlib import Path

import jax
import pytest
from common import auto_mesh
from jax.experimental.pallas import mosaic_gpu
from jax.extend.core import Primitive, primitives

from jaxoffload import _jax

ROOT = Path(_jax.__file__).parent
FILES = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}
OTHERS = {name: tree for name, tree in FILES.items() if name != "_jax.py"}
# JAX exports no object for these, or another package defines them.
BY_NAME = {"shard_map", "pvary", "pallas_call", "ffi_call", "custom_vmap_call", "psum_invariant", "reduce_scatter"}
BY_NAME |= {"ragged_dot_general", "dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper"}
BY_NAME |= {"call_hi_primitive", "mpmd_map"}


# What a regular expression is for: names of JAX's, and those of TransformerEngine's (a primitive's is its own with
# "_wrapper": `BasePrimitive`'s registration in transformer_engine/jax/cpp_extensions/base.py) and XLA's custom calls.
BY_REGEX = {
    "CUDNN_ATTENTION": {f"dot_product_attention_{which}_wrapper" for which in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")},
    "TE_GROUPED_GEMM": {"te_grouped_gemm_ffi_wrapper", "te_grouped_gemm_v2_ffi_wrapper"},
    "MOSAIC_KERNELS": {"pallas_call", "mpmd_map", "mosaic_gpu", "mosaic_gpu_v2"},
}
TE_ATTENTION = {"te_fused_attn_forward_ffi_wrapper", "te_fused_attn_backward_ffi_wrapper"}
BY_REGEX["ATTENTION"] = BY_REGEX["CUDNN_ATTENTION"] | TE_ATTENTION
INTERNAL = ("jax.interpreters", "jax._src")


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def strings(tree):
    """The texts of a module that `importlib` could be given; docstrings have spaces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_imports_the_interpreters_or_the_internals(name):
    assert [m for m in (*imported(OTHERS[name]), *strings(OTHERS[name])) if m.startswith(INTERNAL)] == []


def test_the_named_primitives_exist():
    """If JAX renames or drops a name, this finds it, rather than a residual that is kept twice."""
    sets = [
        value for key, value in vars(_jax).items() if key.isupper() and key[0] != "_" and isinstance(value, (set, dict))
    ]
    names = set().union(*sets) | {_jax.SHARD_MAP, _jax.BARRIER}
    exported = [getattr(module, key) for module in (primitives, jax.lax) for key in dir(module) if key.endswith("_p")]
    ours = {name for name in names if name.startswith("jaxoffload_")}
    assert names - {primitive.name for primitive in exported} - ours == BY_NAME
    assert ours == {"jaxoffload_checkpoint", "jaxoffload_repeated", "jaxoffload_retyped"}


def test_each_regular_expression_matches_its_names_and_no_other():
    regexes = {key: value for key, value in vars(_jax).items() if key.isupper() and "\\w" in str(value)}
    assert regexes.keys() == BY_REGEX.keys()
    every = set().union(*BY_REGEX.values()) | BY_NAME | {"dot_general", "te_norm_forward_ffi_wrapper"}
    for key, regex in regexes.items():
        assert {name for name in every if re.fullmatch(regex, name)} == BY_REGEX[key], key
    assert {name for name in every if _jax.is_attention(name)} == BY_REGEX["ATTENTION"]
    assert {name for name in every if re.fullmatch(_jax.CUDNN_ATTENTION, name)} == BY_REGEX["CUDNN_ATTENTION"]


def test_the_internal_function_and_setting_and_the_primitives_of_kernels_exist():
    assert callable(getattr(importlib.import_module("jax._src.config"), _jax.REMAT3))
    module, config_of = _jax.cudnn_lowering()
    assert callable(config_of)
    names = {value.name for value in vars(module).values() if isinstance(value, Primitive)}
    assert names >= BY_REGEX["CUDNN_ATTENTION"]
    kernel = mosaic_gpu.kernel(lambda x, out: None, out_type=jax.ShapeDtypeStruct((128,), "float32"))
    assert "mpmd_map" in str(jax.make_jaxpr(kernel)(jax.numpy.ones(128)))


def test_the_primitives_that_have_only_a_name_exist():
    mesh = auto_mesh(d=1)
    spec = {"mesh": mesh, "in_specs": jax.P("d"), "out_specs": jax.P("d")}
    x = jax.numpy.ones((4, 4))
    identity = jax.custom_batching.custom_vmap(lambda x: x)
    identity.def_vmap(lambda size, batched, x: (x, batched[0]))
    programs = {
        "pvary": jax.shard_map(lambda x: jax.lax.pcast(1.0, ("d",), to="varying") + x, **spec),
        "psum_invariant": jax.shard_map(lambda x: jax.lax.psum(x, "d") + x, **spec),
        "reduce_scatter": jax.shard_map(lambda x: jax.lax.psum_scatter(x, "d", tiled=True), **spec),
        "shard_map": jax.shard_map(lambda x: x, **spec),
        "ffi_call": jax.ffi.ffi_call("none", jax.ShapeDtypeStruct(x.shape, x.dtype)),
        "ragged_dot_general": lambda x: jax.lax.ragged_dot(x, x[None], jax.numpy.array([4])),
        "custom_vmap_call": identity,
    }
    for name, program in programs.items():
        assert re.search(rf"= {name}\b", str(jax.make_jaxpr(program)(x))), name
