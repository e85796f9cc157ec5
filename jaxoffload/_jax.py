"""What jaxoffload needs of JAX beyond its documented API, and the one way to define a primitive.

`jax.interpreters` re-exports JAX's internals without a promise of stability, and some primitives are known by name
alone. Both come from here: nothing else in jaxoffload imports `jax.interpreters`, and nothing imports `jax._src`. The
oldest jax that we allow is 0.11.2; "since" is the first release that has the name as we use it.

| name                            | what it is for                                                     | since     |
|---------------------------------|--------------------------------------------------------------------|-----------|
| Zero, instantiate_zeros         | tangents and cotangents that are zero, and arrays of them          | <= 0.4.30 |
| UndefinedPrimal, backward_pass  | transpose a linear jaxpr, running its effects once                 | 0.11 (1)  |
| is_undefined_primal             | which operands a transpose rule is asked about                     | <= 0.4.30 |
| add_jaxvals                     | add cotangents of any type                                         | <= 0.4.30 |
| jvp_jaxpr                       | the JVP of a jaxpr, and which results have tangents                | 0.11 (1)  |
| primitive_jvps                  | JVP rules                                                          | <= 0.4.30 |
| primitive_transposes            | transpose rules                                                    | <= 0.4.30 |
| batch_jaxpr_axes                | batch a jaxpr, with its results' batch axes where they are wanted  | 0.11 (1)  |
| zero_if_mapped                  | for it: in front, if the result is batched at all                  | 0.11 (1)  |
| fancy_primitive_batchers        | batching rules that are told the axis                              | 0.4.36    |
| convert_constvars_jaxpr         | constants as operands                                              | 0.11 (1)  |
| partial_eval_jaxpr_nounits      | split a jaxpr into what is known and what is linear                | 0.11 (1)  |
| partial_eval_jaxpr_custom_rules | rules of partial evaluation inside `jax.checkpoint`                | <= 0.4.30 |
| dce_rules                       | rules of dead-code elimination; 0.12 passes live inputs too        | <= 0.4.30 |
| lower_fun, register_lowering    | lowering rules                                                     | <= 0.4.30 |
| i32_attr                        | a StableHLO attribute                                              | <= 0.4.30 |

(1) Not re-exported in 0.10.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters.ad import UndefinedPrimal as UndefinedPrimal
from jax.interpreters.ad import Zero as Zero
from jax.interpreters.ad import add_jaxvals as add_jaxvals
from jax.interpreters.ad import backward_pass as backward_pass
from jax.interpreters.ad import instantiate_zeros as instantiate_zeros
from jax.interpreters.ad import is_undefined_primal as is_undefined_primal
from jax.interpreters.ad import jvp_jaxpr as jvp_jaxpr
from jax.interpreters.ad import primitive_jvps as primitive_jvps
from jax.interpreters.ad import primitive_transposes
from jax.interpreters.batching import batch_jaxpr_axes as batch_jaxpr_axes
from jax.interpreters.batching import fancy_primitive_batchers
from jax.interpreters.batching import zero_if_mapped as zero_if_mapped
from jax.interpreters.mlir import i32_attr as i32_attr
from jax.interpreters.mlir import lower_fun
from jax.interpreters.mlir import register_lowering as register_lowering
from jax.interpreters.partial_eval import convert_constvars_jaxpr as convert_constvars_jaxpr
from jax.interpreters.partial_eval import dce_rules
from jax.interpreters.partial_eval import partial_eval_jaxpr_custom_rules as partial_eval_jaxpr_custom_rules
from jax.interpreters.partial_eval import partial_eval_jaxpr_nounits as partial_eval_jaxpr_nounits

# --- Primitives by name. Those that JAX exports an object for stand here too, where a set needs them.

SHARD_MAP = "shard_map"
PRODUCTS = {"dot_general", "ragged_dot_general"}
# The result is the operand.
IDENTITIES = {"name", "sharding_constraint"}
# The nested jaxpr's results are the equation's own results.
CALLS = {"jit", "remat2", "eval_jaxpr", "jaxoffload_checkpoint"}
# Calls that XLA does not know as such: the nested jaxpr is a part of the program around it.
OPENED = CALLS | {"custom_jvp_call", "custom_vjp_call", SHARD_MAP}
# The nested jaxpr sees a part of each operand.
SLICING = {SHARD_MAP, "scan"}
# One kernel computes all results: recomputing one of them recomputes all. JAX's own kernels, and calls of others'.
KERNELS = {"pallas_call", "ffi_call", "dot_product_attention_fwd_wrapper", "dot_product_attention_fp8_fwd_wrapper"}
# XLA's own of which that is true too, but each result has a name of its own.
SORTING = {"top_k", "sort"}
# The result is the operand, seen otherwise; for an optimization barrier, each result is one.
BARRIER = "optimization_barrier"
VIEWS = {"name", "reduce_precision", "device_put", "reshape", "squeeze", "broadcast_in_dim", "pvary"}
VIEWS |= {"jaxoffload_retyped"}
# The operands, or the first one, pass through.
PASSING = IDENTITIES | {BARRIER, "pvary", "dynamic_update_slice", "jaxoffload_retyped"}
# The results are the operands, or the matmul that follows does the work by itself.
SAME = IDENTITIES | {"reshape", "squeeze", "transpose", "copy", "reduce_precision", "jaxoffload_retyped"}
SAME |= {BARRIER, "pvary"}
# As much is read as the results hold, however large the operands are.
PARTS = {"slice", "dynamic_slice", "gather"}
# Kernels that XLA fuses nothing with; memory bounds them.
ALONE = {"sort", "top_k", "cumsum", "psum", "psum_invariant", "all_gather"}
ALONE |= {"all_to_all", "ragged_all_to_all", "reduce_scatter", "ppermute"}
# Some of an operand is written in place: the number of the operand that says how much.
IN_PLACE = {"dynamic_update_slice": 1, "scatter": 2, "scatter-add": 2}
# The FLOPs are unknown, or only the operands' shapes tell.
OPAQUE = {"pallas_call", "ffi_call", "custom_vmap_call", "conv_general_dilated", "fft", "cholesky", "triangular_solve"}
LOOPS = {"scan", "while"}
# Kernels and control flow: XLA fuses them with nothing. All but scatters write new arrays.
NOT_IN_PLACE = PRODUCTS | ALONE | OPAQUE | LOOPS | {"device_put", "cond"}
UNFUSED = NOT_IN_PLACE | {"scatter", "scatter-add"}
# Regular expressions: cuDNN's and TransformerEngine's attention, TransformerEngine's grouped GEMM, Mosaic's kernels.
ATTENTION = r"(dot_product_attention|te_fused_attn)_\w+_wrapper"
TE_GROUPED_GEMM = r"te_grouped_gemm\w*_wrapper"
MOSAIC = r"pallas_call|mpmd_map|mosaic_gpu\w*"


def ordered_effects(jaxpr: Jaxpr) -> list[Any]:
    """The effects of `jaxpr` that run in order, such as those of `io_callback(..., ordered=True)`."""
    return [effect for effect in jaxpr.effects if type(effect).__name__.startswith("Ordered")]


# --- Our own primitives.

_RULES: dict[str, Any] = {
    "jvp": primitive_jvps,
    "transpose": primitive_transposes,
    "batch": fancy_primitive_batchers,
    "partial_eval": partial_eval_jaxpr_custom_rules,
    "dce": dce_rules,
}


def define[P: Primitive](primitive: P, *, eager: Any = None, results: Any = None, lower: Any = None, **rules: Any) -> P:
    """Give a primitive its rules, in the form that JAX's own primitives have them, and return it.

    Args:
      eager: what it computes outside of a trace.
      results: abstract operands and parameters -> abstract results.
      lower: its MLIR lowering.
      rules: `jvp`, `transpose`, `batch`, `partial_eval` (inside `jax.checkpoint`), `dce`.
    """
    if eager:
        primitive.def_impl(eager)
    if results:
        primitive.def_abstract_eval(results)
    if lower:
        register_lowering(primitive, lower)
    for kind, rule in rules.items():
        _RULES[kind][primitive] = rule
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
        define(self, eager=_evaluate, lower=lower_fun(_evaluate, multiple_results=True))

    def bind(self, *operands: Any, subfuns: Any = (), **params: Any) -> Any:
        if subfuns:
            return self._checked(subfuns[0].call_wrapped, *operands, **params)
        return super().bind(*operands, **params)


def _results(*_: Any, call_jaxpr: Jaxpr, **__: Any) -> tuple[Any, Any]:
    # References that the jaxpr makes and reads itself have no effect outside. If told of one, JAX would look for a
    # rule that turns it into values; otherwise the lowering does that.
    effects = {effect for effect in call_jaxpr.effects if type(effect).__name__ != "InternalMutableArrayEffect"}
    return call_jaxpr.out_avals, effects


def perturbed(tangents: Sequence[Any]) -> tuple[bool, ...]:
    """Which of these tangents, or cotangents, are not symbolic zeros."""
    return tuple(type(t) is not Zero for t in tangents)


def zero_tangent(primal: Any) -> Zero:
    """The symbolic zero among the tangents of an array."""
    return Zero(jax.typeof(primal).to_tangent_aval())


def evaluate(jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """As `jaxpr_as_fun`, except that JAX looks for NaNs as it does in `lax.scan`, not as in `jax.checkpoint`."""
    return eval_jaxpr(jaxpr, jaxpr.consts, *operands)


def _evaluate(*operands: Any, call_jaxpr: Jaxpr, **_: Any) -> list[Any]:
    return jaxpr_as_fun(call_jaxpr)(*operands)
