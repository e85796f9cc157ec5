"""The layers of `benchmarks.dense` and `benchmarks.moe` in PyTorch, trained as its users train: time, memory and
kernels, printed as JSON.

`benchmarks.pytorch` runs this file in a process of its own; it needs torch, and nothing of ours.
"""

import contextlib
import functools
import gc
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Rotation = tuple[torch.Tensor, torch.Tensor]

# Kind -> the names of its kernels, the first that matches: Inductor's tell the operations that it fused.
KINDS = {
    "grouped GEMMs": r"GroupProblemShape|grouped",
    "attention": r"flash|fmha|sdpa|cudnn",
    "matmuls": r"nvjet|gemm|cutlass|xmma|splitK",
    "copies": r"Memcpy",
    "zeros": r"Memset|FillFunctor|fill",
    "activation": r"silu|sigmoid",
    "routing": r"[Ss]ort|topk|TopK|index|gather|scatter|bucketize|searchsorted",
    "norms": r"rsqrt|rms|pow",
    "RoPE": r"(?<!con)cat_|_cat|cos|sin|neg|slice|split",
    "casts": r"triton_poi_fused__to_copy(_(view|t|transpose|clone|unsafe))*_\d+|copy_kernel|direct_copy",
    "sums of gradients": r"CUDAFunctor_add|multi_tensor_apply",
}


class Block(nn.Module):
    """RMSNorm, causal grouped-query attention with RoPE, RMSNorm, SwiGLU or experts with it; no biases."""

    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        width, self.head_dim = sizes["d_model"], sizes["head_dim"]
        heads, kv_heads = sizes["heads"] or width // self.head_dim, sizes["kv_heads"]
        linear = functools.partial(nn.Linear, bias=False)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.out = linear(width, heads * self.head_dim), linear(heads * self.head_dim, width)
        self.k, self.v = (linear(width, kv_heads * self.head_dim) for _ in "kv")
        self.mlp = Experts(sizes) if sizes["experts"] else MLP(width, width * 7 // 2)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Return (batch, seq, d_model), as `x` is."""
        in_heads = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        norm = self.attention_norm(x)
        q, k = (rotated(in_heads(matmul(norm)), rotation) for matmul in (self.q, self.k))
        context = F.scaled_dot_product_attention(q, k, in_heads(self.v(norm)), is_causal=True, enable_gqa=True)
        x = x + self.out(context.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class MLP(nn.Module):
    """SwiGLU between matmuls."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """An MLP for each token's best experts, with the arithmetic of `models.moe`; no row is dropped, none is padded."""

    def __init__(self, sizes: dict[str, int]):
        super().__init__()
        count, width, hidden = sizes["experts"], sizes["d_model"], sizes["d_expert"]
        self.router, self.per_token = nn.Linear(width, count, bias=False), sizes["experts_per_token"]
        matrices = lambda d_in, d_out: nn.Parameter(d_in**-0.5 * torch.randn(count, d_out, d_in))
        self.gate, self.up, self.down = matrices(width, hidden), matrices(width, hidden), matrices(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        with torch.autocast(DEVICE, enabled=False):
            scores = self.router(tokens.float()).softmax(-1)
        weights, ids = scores.topk(self.per_token)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        expert_of_row, order = ids.flatten().sort(stable=True)
        place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        every = torch.arange(len(self.gate), device=x.device)
        ends = torch.searchsorted(expert_of_row, every, right=True, out_int32=True)
        matmul = lambda rows, matrices: F.grouped_mm(rows, matrices.to(rows.dtype).transpose(1, 2), offs=ends)
        rows = Moved.apply(tokens[:, None].expand(-1, self.per_token, -1).flatten(0, 1), order, place)
        act = F.silu(matmul(rows, self.gate)) * matmul(rows, self.up)
        # As in ours, so that the backward pass does not need the output of the last grouped GEMM.
        act = (act.float() * Moved.apply(weights.flatten()[:, None], order, place)).to(x.dtype)
        rows = Moved.apply(matmul(act, self.down), place, order)
        return rows.unflatten(0, ids.shape).float().sum(1).to(x.dtype).view_as(x)


class Moved(torch.autograd.Function):
    """Rows in another order; autograd's own transpose would be a scatter that adds."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, there: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows[there]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return cotangent[ctx.saved_tensors[0]], None, None


def rotated(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    (a, b), (cos, sin) = x.float().chunk(2, -1), rotation
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def rotations(seq: int, head_dim: int, theta: float) -> Rotation:
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def half_of_matmuls() -> Any:
    """Save attention's results, and every second matmul's; recompute the rest, as torchtitan does."""
    aten, count = torch.ops.aten, {False: 0, True: 0}
    names = [name for name in dir(aten) if re.fullmatch(r"_scaled_dot_product_(flash|cudnn|efficient)_attention", name)]
    attention, matmuls = {getattr(aten, name).default for name in names}, (aten.mm.default, aten._grouped_mm.default)

    def decide(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op in matmuls:
            count[context.is_recompute] += 1
        saved = op in attention or (op in matmuls and count[context.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Move a saved tensor as `save_on_cpu` does, but keep strides, which compiled layers insist on, and leave bfloat16
    weights where they are."""
    if isinstance(x, nn.Parameter) or x.numel() < 2**16:
        return x
    return torch.empty_like(x, device="cpu", pin_memory=DEVICE == "cuda").copy_(x, non_blocking=True)


def to_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE, non_blocking=True)


def layer_of(mode: str, layer: nn.Module) -> Callable[..., torch.Tensor]:
    """Return a compiled layer, (x, rotation) -> x, that keeps what its backward pass needs as a mode keeps it."""
    compiled = functools.partial(torch.compile, fullgraph=True)
    if mode == "no checkpoint":
        return compiled(layer)
    if mode == "moved by hooks":
        moved = compiled(layer)

        def with_hooks(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            with saved_tensors_hooks(to_host, to_device):
                return moved(x, rotation)

        return with_hooks
    # Without a policy, a compiled checkpoint saves what an `autograd.Function` returns.
    nothing = functools.partial(create_selective_checkpoint_contexts, [])
    policy = {"selective checkpointing": half_of_matmuls, "everything recomputed": nothing}[mode]
    how = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": policy}
    # The checkpoint is compiled, too: around a compiled layer a policy sees no `mm`, but Inductor's own calls.
    return compiled(lambda x, rotation: checkpoint(layer, x, rotation, **how))


def mean_square(y: torch.Tensor) -> torch.Tensor:
    return y.float().square().mean()


def step_of(mode: str, layers: nn.ModuleList, batch: torch.Tensor, rotation: Rotation) -> Callable[[], None]:
    """Return a step: gradients summed over the microbatches of `batch`, and the weights descend along them."""
    compiled, loss_of = [layer_of(mode, layer) for layer in layers], torch.compile(mean_square)
    weights = list(layers.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights]
    wide = weights[-1].dtype == torch.float32
    rounded = torch.autocast(DEVICE, torch.bfloat16) if wide else contextlib.nullcontext()

    def step() -> None:
        for x in batch:
            with rounded:
                for layer in compiled:
                    x = layer(x, rotation)
            loss_of(x).backward()
        with torch.no_grad():
            torch._foreach_add_(weights, gradients, alpha=-1e-4 / len(batch))
            torch._foreach_zero_(gradients)

    return step


def measured(mode: str, sizes: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step, bytes as PyTorch's allocator counts them, and milliseconds by kind."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layers = nn.ModuleList(Block(sizes) for _ in range(sizes["layers"])).to(getattr(torch, sizes["param_dtype"]))
        for each in layers.modules():
            if isinstance(each, Experts):
                each.router.float()  # as ours is
        rotation = rotations(sizes["seq"], sizes["head_dim"], sizes["rope_theta"])
        batch = torch.randn(sizes["microbatches"], sizes["batch"], sizes["seq"], sizes["d_model"], dtype=torch.bfloat16)
    step = step_of(mode, layers, batch, rotation)
    finish = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    for _ in range(2):
        step()
    finish()
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        finish()
        times.append(1e3 * (time.perf_counter() - begin))
    weights = sum(w.numel() * w.element_size() for w in layers.parameters())
    found = {"step_ms": statistics.median(times), "spread_ms": [min(times), max(times)], "weight_bytes": weights}
    if DEVICE == "cuda":
        found |= {"peak_bytes": torch.cuda.max_memory_allocated(), "kernels_ms": kernels(step)}
    return found


def kernels(step: Callable[[], None]) -> dict[str, float]:
    """Return the milliseconds of a step's kernels by kind, and those in which none ran, host copies or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    on_device = [e for e in on_gpu if not re.match("Memcpy (HtoD|DtoH)", e.name)]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in on_device)
    of: dict[str, float] = {}
    busy, until = 0.0, spans[0][0]
    for start, end, name in spans:
        kind = next((kind for kind, names in KINDS.items() if re.search(names, name)), "other")
        of[kind] = of.get(kind, 0.0) + (end - start) / 1e3
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return of | {"idle": (until - spans[0][0] - busy) / 1e3}


def each(modes: list[str], sizes: dict[str, Any], steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for mode in modes:
        try:
            yield mode, measured(mode, sizes, steps)
        except torch.OutOfMemoryError as error:
            yield mode, {"cannot": str(error)[:300]}
        torch._dynamo.reset()
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    modes = dict(each(given["modes"], given["sizes"], given["steps"]))
    print(json.dumps({"device": device, "versions": {"torch": torch.__version__}, "modes": modes}))
