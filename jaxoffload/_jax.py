"""The parts of JAX beyond its documented API that jaxoffload needs, and the one way to define a primitive.

`jax.interpreters` re-exports JAX's internals without a promise of stability, and some primitives are known by name
alone. Both come from here, and the two names of `jax._src` that we reach: nothing else in jaxoffload imports
`jax.interpreters` or `jax._src`.
"""

import contextlib
import functools
import importlib
import math
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.ref import AbstractRef

# --- `jax.interpreters`: what each is for, and the first jax that re-exports it (0.4.30: or an older one). The oldest
# that we allow is 0.11.2; 0.10 lacked those that say 0.11.

Zero = ad.Zero  # a tangent or cotangent that is zero; 0.4.30
instantiate_zeros = ad.instantiate_zeros  # an array for a `Zero`; 0.4.30
add_jaxvals = ad.add_jaxvals  # the sum of cotangents of any type; 0.4.30
jvp_jaxpr = ad.jvp_jaxpr  # the JVP of a jaxpr, and which results have tangents; 0.11
backward_pass = ad.backward_pass  # transpose a linear jaxpr and run its effects once; 0.11
UndefinedPrimal = ad.UndefinedPrimal  # what `backward_pass` transposes by; 0.4.30
is_undefined_primal = ad.is_undefined_primal  # whether a transpose rule is asked about an operand; 0.4.30
primitive_jvps = ad.primitive_jvps  # JVP rules; 0.4.30
primitive_transposes = ad.primitive_transposes  # transpose rules; 0.4.30
fancy_primitive_batchers = batching.fancy_primitive_batchers  # batching rules that are told the axis; 0.4.36
batch_jaxpr_axes = batching.batch_jaxpr_axes  # batch a jaxpr, with its results' batch axes as they are wanted; 0.11
zero_if_mapped = batching.zero_if_mapped  # for it: axis 0, if the result is batched at all; 0.11
partial_eval_rules = pe.partial_eval_jaxpr_custom_rules  # partial evaluation inside `jax.checkpoint`; 0.4.30
partial_eval_jaxpr_nounits = pe.partial_eval_jaxpr_nounits  # split a jaxpr into known and unknown (linear) parts; 0.11
convert_constvars_jaxpr = pe.convert_constvars_jaxpr  # constants as operands; 0.11
lower_jaxpr = pe.lower_jaxpr2  # a jaxpr without "hi" primitives; 0.11
dce_jaxpr = pe.dce_jaxpr  # dead-code elimination; 0.4.30
dce_rules = pe.dce_rules  # its rules; 0.12 also passes which inputs are live; 0.4.30
lower_fun = mlir.lower_fun  # a lowering rule from a function; 0.4.30
register_lowering = mlir.register_lowering  # lowering rules; 0.4.30
i32_attr = mlir.i32_attr  # an attribute of StableHLO; 0.4.30

# --- Memory spaces.

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_host(aval: Any) -> bool:
    """Return if an abstract value lives in host memory (`f32<host>[...]` in a jaxpr)."""
    return getattr(aval, "memory_space", None) == HOST


def on_device(x: Any) -> Any:
    """Return `x` in device memory."""
    return jax.device_put(x, DEVICE) if on_host(jax.typeof(x)) else x


def in_memory_of(aval: Any, x: Any) -> Any:
    """Return `x`, which is in device memory, where `aval` is: the cotangent of a weight on the host belongs there."""
    return jax.device_put(x, HOST) if on_host(aval) else x


def nbytes(aval: Any) -> int:
    """Return the bytes of an array in XLA's memory, where several elements of 4 or 2 bits share a byte."""
    return -(-math.prod(aval.shape) * _bits(aval.dtype) // 8)


@functools.cache
def _bits(dtype: Any) -> int:
    """Return the bits of an array's element. In NumPy an element of fewer than 8 bits takes a byte."""
    if not hasattr(dtype, "itemsize"):
        return 8 * nbytes(dtype._rules.physical_element_aval(dtype))
    if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize


# --- Extended dtypes: those of PRNG keys, and others' own, such as Flax's for the scales of fp8. An own one has no
# `itemsize`, and JAX adds its cotangents by a rule that need not begin with 0. Only its `_rules` say both.


def zero_of(dtype: Any) -> Any:
    """Return what sums of cotangents of this dtype begin with."""
    return dtype._rules.zero(dtype) if jnp.issubdtype(dtype, jax.dtypes.extended) else 0


# --- Primitives by name. Those that JAX exports an object for stand here too, where a set needs them.

SHARD_MAP, BARRIER, _RETYPED = "shard_map", "optimization_barrier", "jaxoffload_retyped"
FORWARD, BACKWARD = "jaxoffload_forward", "jaxoffload_backward"  # the loops of `scan`
INTERLEAVED = "jaxoffload_interleaved"  # `accumulate`
REPEATED = "jaxoffload_repeated"  # a loop over ticks
UNINITIALISED = "jaxoffload_uninitialised"  # a new stack

# What has a nested jaxpr. Its results are the equation's own results:
CALLS = {"jit", "remat2", "eval_jaxpr", "jaxoffload_checkpoint"}
# Autodiff runs a rule of the user's instead; "call_hi_primitive" under `jax_custom_vjp3` and `jax_custom_jvp3`.
_HIGH = {"call_hi_primitive"}
VJP_RULES = {"custom_vjp_call"} | _HIGH
CUSTOM_RULES = VJP_RULES | {"custom_jvp_call"}
# Calls that XLA does not know as such: the nested jaxpr is a part of the program around it.
OPENED = CALLS | {"custom_jvp_call", "custom_vjp_call", SHARD_MAP, REPEATED}

# What passes values on. The results are the operands:
IDENTITIES = {"name", "sharding_constraint", "pvary", BARRIER, _RETYPED}
# The results are the operands, or the matmul that follows does the work by itself:
SAME = IDENTITIES | {"reshape", "squeeze", "transpose", "copy", "reduce_precision"}
# The result is the operand, seen otherwise, if it has as many bytes; for an optimization barrier, each result is one.
VIEWS = {"name", "reduce_precision", "device_put", "reshape", "squeeze", "broadcast_in_dim", "pvary", _RETYPED}
# A result has its operand's elements, each once: in another shape or order; in another dtype or memory, too.
RESHAPES = {"reshape", "squeeze", "broadcast_in_dim", "transpose", "rev"}
MOVES = RESHAPES | {"name", "sharding_constraint", BARRIER, "copy", "convert_element_type", "device_put"}

# What computes.
# An element of the results is computed from the elements of the operands at the same place, or from scalars.
ELEMENTWISE = {"abs", "add", "and", "bitcast_convert_type", "cbrt", "ceil", "clamp", "convert_element_type", "copy"}
ELEMENTWISE |= {"cos", "cosh", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge"}
ELEMENTWISE |= {"gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"}
ELEMENTWISE |= {"neg", "nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n"}
ELEMENTWISE |= {"shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square"}
ELEMENTWISE |= {"stop_gradient", "sub", "tan", "tanh", "xor"}
MATMULS = {"dot_general", "ragged_dot_general"}
# One kernel computes all results: recomputing one of them recomputes all. JAX's own kernels, and calls of others'.
_PALLAS = {"pallas_call", "mpmd_map"}
KERNELS = _PALLAS | {"ffi_call", "dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper"}
# Those of Mosaic's, which XLA lets read a row of a stack where it is, if it can compute the row's offset.
READS_IN_PLACE = {"mpmd_map"}
# XLA's own of which that is true too, but each result has a name of its own.
SORTING = {"top_k", "sort"}
REDUCTIONS = {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"}
REDUCTIONS |= {"reduce_xor", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
# As much is read as the results hold, however large the operands are.
PARTS = {"slice", "dynamic_slice", "gather"}
# Kernels that XLA fuses nothing with; memory bounds them.
COLLECTIVES = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_to_all", "ragged_all_to_all"}
COLLECTIVES |= {"reduce_scatter", "ppermute"}
_ABOUT_AXES = {"axis_index", "pvary"}  # about axes, and nothing is sent
ALONE = SORTING | {"cumsum"} | COLLECTIVES
# Some of an operand is written in place: the number of the operand that says how much.
IN_PLACE = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
# The FLOPs are unknown, or only the operands' shapes tell.
OPAQUE = _PALLAS | {"ffi_call", "custom_vmap_call", "conv_general_dilated", "fft", "cholesky", "triangular_solve"}
# What draws random numbers from a key.
DRAWS = {"random_bits", "random_gamma", "rng_bit_generator"}
# Kernels and control flow: XLA fuses them with nothing.
UNFUSED = MATMULS | ALONE | OPAQUE | {"scan", "while", "cond", "device_put", "scatter", "scatter-add"}
# Regular expressions: cuDNN's and TransformerEngine's attention, TransformerEngine's grouped GEMM, Mosaic's kernels.
CUDNN_ATTENTION = r"dot_product_attention_\w+_wrapper"
ATTENTION = rf"{CUDNN_ATTENTION}|te_fused_attn_\w+_wrapper"
TE_GROUPED_GEMM = r"te_grouped_gemm\w*_wrapper"
MOSAIC_KERNELS = r"pallas_call|mpmd_map|mosaic_gpu\w*"


@functools.cache
def is_attention(name: str) -> bool:
    """Return if a primitive of this name is cuDNN's or TransformerEngine's attention."""
    return re.fullmatch(ATTENTION, name) is not None


def causal_window(params: dict[str, Any]) -> tuple[bool, int]:
    """Return if an attention kernel with these parameters skips the keys after a query, and how many keys up to it are
    in its window; 0: all."""
    of_te = params.get("config")  # TransformerEngine's
    mask = params.get("mask_type", getattr(of_te, "attn_mask_type", None))
    left, right = getattr(of_te, "window_size", (-1, -1))
    is_causal = params.get("use_causal_mask", False) or "CAUSAL" in getattr(mask, "name", "") or right == 0
    window = params.get("sliding_window_length") or (left + 1 if is_causal else 0)
    return is_causal or window > 0, window


# --- Two names of `jax._src`: JAX's function that writes the configuration of a call of cuDNN's attention, and the
# setting `jax_remat3`.

CUDNN_CONFIG = "create_dot_product_attention_backend_config_base"


def cudnn_lowering() -> tuple[Any, Callable[..., dict[str, Any]] | None]:
    """Return the module of JAX that has CUDNN_CONFIG, and that function; None where this JAX has none."""
    try:
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    except ImportError:
        return None, None
    return module, getattr(module, CUDNN_CONFIG, None)


REMAT3 = "remat3"


def without_remat3[**P, T](f: Callable[P, T]) -> Callable[P, T]:
    """Return `f`, in which `jax.checkpoint` and `checkpoint_name` always bind the primitives `remat2` and `name`.

    `jax_remat3` makes other equations of them, whose names and jaxprs our plans do not see. JAX has no public way to
    set it for one thread and one part of a program. A JAX without the setting has only this kind.
    """

    @functools.wraps(f)
    def without(*args: P.args, **kwargs: P.kwargs) -> T:
        remat3 = getattr(importlib.import_module("jax._src.config"), REMAT3, lambda _: contextlib.nullcontext())
        with remat3(False):
            return f(*args, **kwargs)

    return without


def axes_named(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the axes of meshes that a collective is over; none for other equations."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    named = (axes,) if isinstance(axes, str) else axes if isinstance(axes, tuple | list) else ()
    return () if eqn.primitive.name in _ABOUT_AXES else tuple(axis for axis in named if isinstance(axis, str))


def where_written(eqn: JaxprEqn) -> str:
    """Return the file and line of the user's that an equation stands for, with its function."""
    return source_info_util.summarize(eqn.source_info)


def ordered_effects(jaxpr: Jaxpr) -> list[Any]:
    """Return the effects of `jaxpr` that run in order, such as those of `io_callback(..., ordered=True)`."""
    return [effect for effect in jaxpr.effects if type(effect).__name__.startswith("Ordered")]


def has_vjp_rule(eqn: JaxprEqn) -> bool:
    """Return if autodiff runs a rule of the user's. JAX's own functions are a "call_hi_primitive", too."""
    return eqn.primitive.name in VJP_RULES and (eqn.primitive.name not in _HIGH or traced_function(eqn) is not None)


def traced_function(eqn: JaxprEqn) -> Jaxpr | None:
    """Return the function that autodiff replaces by a rule, under `jax_custom_vjp3` and `jax_custom_jvp3`."""
    params = getattr(eqn.params.get("_prim"), "params", {})
    return getattr(params.get("traced"), "jaxpr", None)


def has_effects(eqn: JaxprEqn) -> bool:
    """Return if an equation does more than compute: to name a mesh axis is called an effect too."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


# --- The compilation whose end `jax.monitoring` reports. It tells a listener the name of the function alone; the rest
# are local variables of the function of JAX that reports. Reading them changes nothing. What a listener raises, whoever
# compiles the program gets, before it runs.

COMPILED = "/jax/core/compile/backend_compile_duration"
COMPILATION = ("computation", "compiler_options_kvs", "xla_executable")


class Compilation(NamedTuple):
    """A module, as it was lowered; the options of `jax.jit` and of `.compile()`; and what XLA made of it."""

    module: Any
    options: dict[str, Any]
    executable: Any

    @property
    def text(self) -> str:
        """The compiled program, as `as_text()` of it."""
        return "\n".join(module.to_string() for module in self.executable.hlo_modules())


Look = Callable[[Compilation], None]
_looks: weakref.WeakKeyDictionary[Any, set[Look]] = weakref.WeakKeyDictionary()


def when_compiled(ctx: Any, look: Look) -> None:
    """Call `look` each time that the module is compiled whose lowering rules have this context. It may raise.

    A lowering rule knows neither the options, which may come with `.lower(...).compile(compiler_options=...)`, nor what
    XLA will make of the module.
    """
    _listen()
    _looks.setdefault(ctx.module_context.module, set()).add(look)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_compiled)


def _compiled(event: str, *_: Any, **__: Any) -> None:
    if event == COMPILED and _looks and (compilation := this_compilation()):
        for look in _looks.get(compilation.module, ()):
            look(compilation)


def this_compilation() -> Compilation | None:
    """Return the compilation that ended, for a listener; None where this JAX hides it."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if all(name in frame.f_locals for name in COMPILATION):
            module, options, executable = (frame.f_locals[name] for name in COMPILATION)
            return Compilation(module, dict(options), executable)
    return None


def lowers_for_one_device(ctx: Any) -> bool:
    """Return if the code, of which a lowering rule has this context, is for one device: XLA has nothing to divide."""
    of = ctx.module_context.axis_context
    return getattr(of, "num_devices", 0) == 1 or (hasattr(of, "mesh") and of.manual_axes == {*of.mesh.axis_names})


# --- Our own primitives.

Values = Sequence[Any]
Results = tuple[list[Any], list[Any]]  # of a rule: results, and their tangents or batch axes
_RULES: dict[str, Any] = {
    "jvp": primitive_jvps,
    "transpose": primitive_transposes,
    "batch": fancy_primitive_batchers,
    "partial_eval": partial_eval_rules,
    "dce": dce_rules,
}


def define[P: Primitive](primitive: P, *, eager: Any = None, results: Any = None, lower: Any = None, **rules: Any) -> P:
    """Give a primitive its rules, in JAX's form, and return it.

    `eager` computes it outside of a trace, `results` its abstract results, `lower` its MLIR. The other `rules` are
    `jvp`, `transpose`, `batch`, `partial_eval` (inside `jax.checkpoint`) and `dce`; what they trace is without
    `jax_remat3`.
    """
    if eager:
        primitive.def_impl(eager)
    if results:
        primitive.def_abstract_eval(results)
    if lower:
        register_lowering(primitive, lower)
    for kind, rule in rules.items():
        _RULES[kind][primitive] = without_remat3(rule)
    return primitive


class Call(Primitive):
    """A primitive that computes its parameter `call_jaxpr`, until it is differentiated.

    `checkify` has no rule for it: it checks the `call_jaxpr`, and binds the primitive to the error, the operands and,
    instead of that jaxpr, `subfuns`: the checked function
    (`default_checkify_rule`, https://github.com/jax-ml/jax/blob/main/jax/_src/checkify.py).
    """

    multiple_results = True

    def __init__(self, name: str, checked: Callable[..., list[Any]] = lambda run, *operands, **_: run(*operands)):
        """`checked(run, error, *operands, **params)` binds the checked function; by default it is inlined."""
        super().__init__(name)
        self._checked = checked
        self.def_effectful_abstract_eval(_results)
        define(self, eager=_evaluate, lower=lower_call)

    def bind(self, *operands: Any, subfuns: Any = (), **params: Any) -> Any:
        if subfuns:
            return self._checked(subfuns[0].call_wrapped, *operands, **params)
        return super().bind(*operands, **params)

    def to_lojax(self, *operands: Any, call_jaxpr: Jaxpr, **params: Any) -> Any:
        """Compute the jaxpr without "hi" primitives, such as that of `jnp.searchsorted`, which have no lowering."""
        return self.bind(*operands, call_jaxpr=lower_jaxpr(call_jaxpr), **params)


def _results(*_: Any, call_jaxpr: Jaxpr, **__: Any) -> tuple[Any, Any]:
    # References that the jaxpr makes and reads itself have no effect outside. If told of one, JAX would look for a
    # rule that turns it into values; otherwise the lowering does that.
    effects = {effect for effect in call_jaxpr.effects if type(effect).__name__ != "InternalMutableArrayEffect"}
    return call_jaxpr.out_avals, effects


def perturbed(tangents: Sequence[Any]) -> tuple[bool, ...]:
    """Return which of these tangents, or cotangents, are not symbolic zeros."""
    return tuple(type(t) is not Zero for t in tangents)


def with_zeros(outs: Sequence[Any], out_perturbed: Sequence[bool]) -> Results:
    """Split a JVP's results from the tangents of the perturbed ones, and fill in symbolic zeros for the others."""
    primals, tangents = list(outs[: len(out_perturbed)]), iter(outs[len(out_perturbed) :])
    zero = lambda primal: Zero(jax.typeof(primal).to_tangent_aval())
    return primals, [next(tangents) if p else zero(x) for x, p in zip(primals, out_perturbed, strict=True)]


def is_traceable(x: Any) -> bool:
    """Return if JAX takes `x` for an array: one, what converts itself to one, or a number of Python's."""
    return isinstance(x, int | float | complex) or any(hasattr(x, name) for name in ("dtype", "__jax_array__"))


def as_array(x: Any) -> jax.Array:
    """Return `x` as an array; `x` itself if it is one, because `jnp.asarray` copies a tracer's value outside of jit."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def evaluate(jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr. JAX then looks for NaNs as in `lax.scan`; for `jaxpr_as_fun` it does as in `jax.checkpoint`.

    Constants among the results are arrays, too: JAX returns a bool, or numbers of a type of its own.
    """
    outs = zip(jaxpr.outvars, eval_jaxpr(jaxpr, jaxpr.consts, *operands), strict=True)
    return [x if isinstance(v.aval, AbstractRef) else as_array(x) for v, x in outs]


def _evaluate(*operands: Any, call_jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*operands)


lower_call = lower_fun(_evaluate, multiple_results=True)  # the lowering rule of a `Call`
