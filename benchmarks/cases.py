"""What a benchmark compares: cases (the layers) and modes (which residuals are kept where, under which XLA options)."""

import argparse
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxoffload import compiler_options
from models.config import Model

# "ours": jaxoffload.scan. "jax": lax.scan(jax.checkpoint(f)). "jax in scan": the same with prevent_cse=False, as JAX
# recommends inside a scan. "no remat": lax.scan(f).
Peer = Literal["ours", "jax", "jax in scan", "no remat"]
Options = dict[str, Any]


class Variant(NamedTuple):
    """One way to run a mode: the peer, the decision per residual, and XLA's options."""

    peer: Peer
    residuals: dict[str, str]
    options: Options
    fields: tuple[tuple[str, Any], ...] = ()  # further fields of the policy of "ours"


OVERLAP = compiler_options("gpu")
PIPELINED = {**OVERLAP, "xla_gpu_enable_pipelined_host_offloading": True}


def best(offloaded: str, saved: str = "", copy_ms: float | None = None, **fields: int) -> Variant:
    """Return a candidate for `ours_best`.

    Args:
      offloaded: names to offload, separated by spaces; `layer_input` comes on top.
      saved: names to save.
      copy_ms: as in `compiler_options`.
      fields: further fields of the policy.
    """
    residuals = dict.fromkeys(["layer_input", *offloaded.split()], "offload") | dict.fromkeys(saved.split(), "save")
    return Variant("ours", residuals, compiler_options("gpu", copy_ms=copy_ms), tuple(fields.items()))


class Case(NamedTuple):
    """The layers on which a benchmark compares the peers."""

    program: str  # the module in this package
    description: str
    names: tuple[str, ...]  # residuals that modes save or offload; the others are recomputed
    all_names: tuple[str, ...]  # with all of these saved, no named value is recomputed
    always: tuple[str, ...]  # residuals that every peer saves: routing must not be recomputed
    best: dict[str, Variant]  # candidates for `ours_best`
    model: Callable[[argparse.Namespace], Model]
    costs: Callable[[argparse.Namespace], dict[str, tuple[int, int]]]  # name -> FLOPs and bytes per layer
    shape: Callable[[argparse.Namespace], dict[str, Any]]  # recorded in the result file
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None  # adds the case's own


def _each(residuals: dict[str, str], **variants: tuple[Peer, Options]) -> dict[str, Variant]:
    return {name.replace("_", " "): Variant(peer, residuals, xla) for name, (peer, xla) in variants.items()}


def _jax(residuals: dict[str, str], **options: Options) -> dict[str, Variant]:
    """JAX's variants: each set of XLA options, with `prevent_cse` at its default and as JAX recommends in a scan."""
    peers: dict[str, Peer] = {"": "jax", "_no_barriers": "jax in scan"}
    return _each(residuals, **{name + end: (peer, xla) for name, xla in options.items() for end, peer in peers.items()})


def modes_of(case: Case) -> dict[str, dict[str, Variant]]:
    """Return mode -> name -> variant.

    The fastest variant of a mode counts. For `ours_best` it is the fastest that needs no more memory than `remat`.
    """
    save, offload = dict.fromkeys(case.names, "save"), dict.fromkeys(case.names, "offload")
    save_all = dict.fromkeys(case.all_names, "save")
    return {
        "remat": _jax({}, defaults={}, overlap=OVERLAP),
        "saved": _jax(save, defaults={}, overlap=OVERLAP),
        "saved_all": {
            "no checkpoint": Variant("no remat", {}, {}),
            "all names": Variant("jax in scan", save_all, {}),
            "all names, overlap": Variant("jax in scan", save_all, OVERLAP),
        },
        "jax_offload": _each(offload, defaults=("jax", {})),
        "jax_offload_tuned": _jax(offload, overlap=OVERLAP, overlap_and_pipelined=PIPELINED),
        "ours": _each(offload, overlap=("ours", OVERLAP)),
        "ours_saved": _each(save, overlap=("ours", OVERLAP)),
        "ours_saved_context": _each(save | {"attn/context": "save"}, overlap=("ours", OVERLAP)),
        "ours_saved_all": _each(save_all, defaults=("ours", {}), overlap=("ours", OVERLAP)),
        "ours_best": case.best,
    }


MODES = ("remat", "saved", "saved_all", "jax_offload", "jax_offload_tuned")
MODES += ("ours", "ours_saved", "ours_saved_context", "ours_saved_all", "ours_best")


def attention_costs(shape: Model, tokens: int) -> dict[str, tuple[int, int]]:
    """Return FLOPs and bytes per layer of the bf16 residuals before the MLP; attention's FLOPs are timed instead."""
    D, KV = shape.d_model, shape.kv_heads * shape.d_head
    matmul = lambda d_in, d_out: (2 * tokens * d_in * d_out, 2 * tokens * d_out)
    return {
        "layer_input": (0, 2 * tokens * D),
        "attn/q": matmul(D, shape.heads * shape.d_head),
        "attn/k": matmul(D, KV),
        "attn/v": matmul(D, KV),
        "attn/context": (0, tokens * shape.heads * (2 * shape.d_head + 4)),  # with float32 softmax statistics
        "mlp_input": matmul(shape.heads * shape.d_head, D),
    }


def layers_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what every result file records about its layers."""
    keys = ("layers", "batch", "seq", "d_model", "kv_heads", "attention", "fsdp", "expert")
    return {**{key: getattr(options, key) for key in keys}, "dtype": "bfloat16 on float32"}
