"""What the peers are compared on: who keeps which residuals where, under which of XLA's options."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxoffload import compiler_options


class Variant(NamedTuple):
    """One way to run a mode: who keeps which residuals where, and XLA's options."""

    # "ours": jaxoffload.scan; "jax": lax.scan(jax.checkpoint(f)); "loop": the same with prevent_cse=False, as JAX
    # advises in a scan; "nobody": lax.scan(f)
    who: str
    residuals: dict[str, str]
    options: dict[str, Any]
    fields: tuple[tuple[str, Any], ...] = ()  # of the policy of "ours": others than its residuals


OVERLAP = compiler_options("gpu")
PIPELINED = {**OVERLAP, "xla_gpu_enable_pipelined_host_offloading": True}


def best(moved: str, kept: str = "", copy_ms: float | None = None, **fields: int) -> Variant:
    """A candidate for `ours_best`: names that go to the host with `layer_input`, names that stay, how long before the
    end of its turn a copy begins, other fields."""
    decisions = dict.fromkeys(["layer_input", *moved.split()], "offload") | dict.fromkeys(kept.split(), "save")
    return Variant("ours", decisions, compiler_options("gpu", copy_ms=copy_ms), tuple(fields.items()))


class Case(NamedTuple):
    """What a benchmark compares the peers on."""

    program: str  # of this package
    description: str
    names: tuple[str, ...]  # that are saved, or offloaded; the rest is computed again
    all_names: tuple[str, ...]  # with which nothing that has a name is computed again
    always: tuple[str, ...]  # that every peer saves: routing, which must not be computed again
    best: dict[str, Variant]  # candidates for ours_best
    model: Callable[[argparse.Namespace], Any]  # as `models.config.Model`
    costs: Callable[[argparse.Namespace], dict[str, tuple[int, int]]]  # name -> FLOPs and bytes of a layer
    shape: Callable[[argparse.Namespace], dict[str, Any]]  # what is recorded of it
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def _each(residuals: dict[str, str], **variants: tuple[str, dict[str, Any]]) -> dict[str, Variant]:
    return {name.replace("_", " "): Variant(who, residuals, xla) for name, (who, xla) in variants.items()}


def _jax(residuals: dict[str, str], **options: dict[str, Any]) -> dict[str, Variant]:
    """With each of XLA's options, as `jax.checkpoint` is by default, and as JAX advises it in a scan."""
    hows = {"": "jax", "_no_barriers": "loop"}
    return _each(residuals, **{name + how: (who, xla) for name, xla in options.items() for how, who in hows.items()})


def modes_of(case: Case) -> dict[str, dict[str, Variant]]:
    """Of each mode the fastest variant counts; of ours_best, the fastest that needs no more memory than remat."""
    save, move = dict.fromkeys(case.names, "save"), dict.fromkeys(case.names, "offload")
    everything = dict.fromkeys(case.all_names, "save")
    return {
        "remat": _jax({}, defaults={}, overlap=OVERLAP),
        "saved": _jax(save, defaults={}, overlap=OVERLAP),
        "saved_all": {
            "no checkpoint": Variant("nobody", {}, {}),
            "all names": Variant("loop", everything, {}),
            "all names, overlap": Variant("loop", everything, OVERLAP),
        },
        "jax_offload": _each(move, defaults=("jax", {})),
        "jax_offload_tuned": _jax(move, overlap=OVERLAP, overlap_and_pipelined=PIPELINED),
        "ours": _each(move, overlap=("ours", OVERLAP)),
        "ours_saved": _each(save, overlap=("ours", OVERLAP)),
        "ours_saved_context": _each(save | {"attn/context": "save"}, overlap=("ours", OVERLAP)),
        "ours_saved_all": _each(everything, defaults=("ours", {}), overlap=("ours", OVERLAP)),
        "ours_best": case.best,
    }


MODES = ("remat", "saved", "saved_all", "jax_offload", "jax_offload_tuned")
MODES += ("ours", "ours_saved", "ours_saved_context", "ours_saved_all", "ours_best")


def attention_costs(shape: Any, tokens: int) -> dict[str, tuple[int, int]]:
    """Of the residuals before the MLP, bf16: FLOPs (attention's are timed instead) and bytes."""
    D, KV = shape.d_model, shape.kv_heads * shape.d_head
    product = lambda into, out: (2 * tokens * into * out, 2 * tokens * out)
    return {
        "layer_input": (0, 2 * tokens * D),
        "attn/q": product(D, shape.heads * shape.d_head),
        "attn/k": product(D, KV),
        "attn/v": product(D, KV),
        "attn/context": (0, tokens * (2 * D + 4 * shape.heads)),  # with float32 softmax statistics
        "mlp_input": product(shape.heads * shape.d_head, D),
    }


def layers_of(options: argparse.Namespace) -> dict[str, Any]:
    """What is recorded of the layers of any case."""
    kept = ("layers", "batch", "seq", "d_model", "kv_heads", "attention", "fsdp", "expert")
    return {**{key: getattr(options, key) for key in kept}, "dtype": "bfloat16 on float32"}
