"""MaxText's and Levanter's own training steps on one GPU: as they are, and with the lines of their recipes.

    python -m benchmarks.trainers [--frameworks maxtext levanter] [--attention te] [--out FILE]

MaxText: its `train.py` under its configuration of Llama 3 8B for GPUs, with what `maxtext` and `MAXTEXT` change, and
the XLA flags of its script for one machine. Levanter: its `Trainer` and its Llama; it ships no flags for GPUs. Both
train float32 weights in bfloat16 by AdamW. Each mode is a process of its own. `step_ms`: the median of the times that
the framework takes of its steps, without the first three; `temp_gib`, `all_gib`: what XLA planned; `peak_gib`: the most
that was allocated, initialisation included. Packages that a dense model's step does not use need not be installed:
`stand_ins` names those for which there was an empty module.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from benchmarks import bench
from benchmarks.bench import GIB, cells, markdown
from benchmarks.stand_ins import StandIns
from jaxoffload import Policy, offload, write_xla_flags

SIZES = {
    "layers": 16,
    "batch": 2,
    "seq": 8192,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "d_ff": 14336,
    "vocab": 128256,
    "vocab_tiles": 1,  # in which MaxText computes its loss
    "attention": "cudnn",
}
ATTENTION = {  # Levanter calls cuDNN through TransformerEngine alone
    "cudnn": {"maxtext": "cudnn_flash_jax", "levanter": "jax_flash"},
    "te": {"maxtext": "cudnn_flash_te", "levanter": "nvte"},
    "xla": {"maxtext": "dot_product", "levanter": "jax_flash"},
}
MODES = {
    "recompute": "everything recomputed",
    "save": "matmuls and attention saved, as its configuration for GPUs has it",
    "offload": "its own offload",
    "offload_flags": "its own offload, under our XLA flags",
    "ours": "**jaxoffload**, the same offloaded",
}
FIRST = 3  # steps that are not counted: they compile, and clocks rise
# configs/gpu/a3/llama_2_7b/1vm.sh, without the dump
MAXTEXT_FLAGS = """
--xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false
--xla_gpu_enable_command_buffer= --xla_gpu_enable_highest_priority_async_stream=true
--xla_gpu_all_reduce_combine_threshold_bytes=134217728 --xla_gpu_all_gather_combine_threshold_bytes=134217728
--xla_gpu_reduce_scatter_combine_threshold_bytes=67108864 --xla_gpu_pipeline_all_gather=on
--xla_gpu_pipeline_reduce_scatter=on --xla_gpu_pipeline_all_reduce=on
--xla_gpu_enable_while_loop_double_buffering=true
--xla_gpu_enable_all_gather_combine_by_dim=false --xla_gpu_enable_reduce_scatter_combine_by_dim=false
--xla_disable_hlo_passes=rematerialization
"""
CUSTOM = {"remat_policy": "custom", "decoder_layer_input": "offload", "mlpwi_0": "offload"}
MAXTEXT = {"recompute": {"remat_policy": "full"}, "save": {}} | dict.fromkeys(
    ("offload", "offload_flags", "ours"), CUSTOM
)
# Tokenizers, kernels for TPUs, launchers, storage, trackers.
ABSENT = {
    "maxtext": "drjax pathwaysutils tiktoken tokamax",
    "levanter": "aiobotocore aiohttp botocore datasets finelog fray gcsfs git google.api_core google.auth google.cloud "
    "iris msgspec pyarrow requests s3fs tblib wandb zstandard",
}


def maxtext(mode: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run MaxText's `train.main`; return the milliseconds and the losses of its steps, and the memory of one."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # without Google Cloud's packages
    import maxtext
    from maxtext.layers.nnx_decoders import NNXDecoder
    from maxtext.trainers.pre_train import train

    planned: list[Any] = []  # the memory analysis that it prints
    train.max_utils.print_compiled_memory_stats = lambda memory, prefix="": planned.append(memory)
    if mode == "ours":
        policy = lambda of: Policy.from_maxtext(of.config.tensors_on_device, of.config.tensors_to_offload)
        NNXDecoder.get_remat_policy = policy
        train.loss_fn = offload(train.loss_fn)
    fields = MAXTEXT[mode] | {
        "attention": ATTENTION[options.attention]["maxtext"],
        "hardware": jax.default_backend(),
        "steps": options.steps + FIRST,
        "per_device_batch_size": options.batch,
        "max_target_length": options.seq,
        "override_model_config": True,
        "base_num_decoder_layers": options.layers,
        "base_emb_dim": options.d_model,
        "base_num_query_heads": options.heads,
        "base_num_kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "base_mlp_dim": options.d_ff,
        "vocab_size": options.vocab,
        "num_vocab_tiling": options.vocab_tiles,
        "packing": False,  # one sequence per row, for `cudnn_flash_jax` knows no segments
        "metrics_file": f"{folder}/metrics.jsonl",
        "base_output_directory": folder,
        "jax_cache_dir": folder,
        "skip_jax_distributed_system": True,
        "enable_goodput_recording": False,
        "log_config": False,
    }
    config = Path(maxtext.__file__).parent / "configs/gpu/models/llama3_8b.yml"
    train.main(["", str(config), *(f"{name}={value}" for name, value in fields.items())])
    steps = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    times, losses = ([step[name] for step in steps] for name in ("perf/step_time_seconds", "learning/loss"))
    return {"ms": [1e3 * seconds for seconds in times], "losses": losses, "memory": planned[0]}


def levanter(mode: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run Levanter's `Trainer.train_step`, and return the same."""
    # It knows no block sizes for an H200: it would take the smallest, the first that compile.
    os.environ["LEVANTER_PALLAS_CE_AUTOTUNE_ON_MISS"] = "0"
    import equinox as eqx
    import haliax as hax
    import jmp
    from haliax.nn import ScanCheckpointPolicy
    from levanter.distributed import DistributedConfig
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.trainer import Trainer, TrainerConfig

    class Offload(ScanCheckpointPolicy):
        def checkpoint(self, carry_name: str, input_name: str, layer: Any) -> Any:
            policy = Policy({carry_name: "offload"}, min_offload_bytes=0)
            return eqx.filter_checkpoint(layer, policy=policy, prevent_cse=False)

    def loss(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    theirs = ScanCheckpointPolicy(save_carries="offload")
    kept = {"recompute": True, "offload": theirs, "offload_flags": theirs, "ours": Offload()}
    model = LlamaConfig(
        max_seq_len=options.seq,
        hidden_dim=options.d_model,
        intermediate_dim=options.d_ff,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        attn_backend=ATTENTION[options.attention]["levanter"],
        gradient_checkpointing=kept[mode],
    )
    config = TrainerConfig(
        id="benchmark",
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        tracker=(),
        log_dir=Path(folder),
        log_jaxprs=False,
        log_xla_hlo=False,
        train_batch_size=options.batch,
        num_train_steps=options.steps + FIRST,
        load_checkpoint=False,
        require_accelerator=False,
        distributed=DistributedConfig(initialize_jax_distributed=False),
    )
    config.initialize()
    adam, axes = AdamConfig().build(config.num_train_steps), (config.TrainBatch, model.max_Pos)
    with Trainer(config, adam, offload(loss) if mode == "ours" else loss, add_default_hooks=False) as trainer:
        build = lambda: model.build(hax.Axis("vocab", options.vocab), key=jax.random.key(1))
        state = trainer.initial_state(jax.random.key(0), model_init=build)
        example = LmExample(hax.random.randint(jax.random.key(2), axes, 0, options.vocab), hax.ones(axes))
        memory = trainer._jit_train_step_fn_no_hook.lower(state, (example,), {}).compile().memory_analysis()
        ms, losses = [], []
        for _ in range(config.num_train_steps):
            info = trainer.train_step(state, example)
            state = info.state
            ms.append(1e3 * info.step_duration)
            losses.append(info.loss)
    return {"ms": ms, "losses": losses, "memory": memory}


FRAMEWORKS = {"maxtext": maxtext, "levanter": levanter}
RELEASES = {"maxtext": "maxtext", "levanter": "marin-levanter"}  # on PyPI


def run_here(options: argparse.Namespace) -> dict[str, Any]:
    """Run a mode in this process, which has its XLA flags; return its facts, and what is known of the framework."""
    bench.prepare(options.attention)
    (framework,), (mode,) = options.frameworks, options.modes
    sys.meta_path.append(stand_ins := StandIns(*ABSENT[framework].split()))
    with tempfile.TemporaryDirectory() as folder:
        found = FRAMEWORKS[framework](mode, options, folder)
    ms, device = found["ms"][FIRST:], jax.local_devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    facts = {"step_ms": statistics.median(ms), "spread_ms": [min(ms), max(ms)], "peak_gib": peak / GIB}
    facts = json.loads(json.dumps(facts), parse_float=lambda x: round(float(x), 4)) | bench.sizes_gib(found["memory"])
    versions = bench.versions() | {(name := RELEASES[framework]): importlib.metadata.version(name)}
    return {
        "device": f"1 {device.device_kind} ({device.platform})",
        "versions": versions,
        "framework": {"attention": ATTENTION[options.attention][framework], "stand_ins": sorted(stand_ins.used)},
        "facts": facts | {"losses": found["losses"]},
    }


def run_child(framework: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a mode in a process with one GPU and the mode's XLA flags, and return what `run_here` does."""
    with tempfile.TemporaryDirectory() as folder:
        theirs = " ".join(MAXTEXT_FLAGS.split()) if framework == "maxtext" else ""
        flags = write_xla_flags(f"{folder}/copies.pbtxt") if mode in ("offload_flags", "ours") else theirs
        environment = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"XLA_FLAGS": flags}
        arguments = [f"--{name}={getattr(options, name)}" for name in (*SIZES, "steps")]
        arguments += ["--frameworks", framework, "--modes", mode, "--child", "--out", f"{folder}/facts.json"]
        command = [sys.executable, "-m", "benchmarks.trainers", *arguments]
        status = subprocess.run(command, env=environment, stdout=sys.stderr).returncode
        found = {"facts": {"cannot": f"exit status {status}"}}
        return found if status else json.loads(Path(folder, "facts.json").read_text())


def main(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"device": "", "versions": {}, "command": bench.command_of("trainers")}
    result |= {"commit": options.commit, "shape": {name: getattr(options, name) for name in SIZES}, "frameworks": {}}
    for framework in options.frameworks:
        of = result["frameworks"][framework] = {"modes": (modes := {})}
        for mode in options.modes:
            if (framework, mode) == ("levanter", "save"):
                continue  # its layers name nothing to save
            found = run_child(framework, mode, options)
            modes[mode] = found["facts"]
            print(framework, mode, found["facts"], file=sys.stderr, flush=True)
            result["device"] = found.get("device", result["device"])
            result["versions"] |= found.get("versions", {})
            of |= found.get("framework", {})
            of["ratios"] = bench.ratios(modes, [("ours", other) for other in MODES if other != "ours"])
            losses = [modes.get(name, {}).get("losses") for name in ("offload", "ours")]
            of |= {"same_losses": losses[0] == losses[1]} if all(losses) else {}
            bench.write(options, result)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    names = {"maxtext": "MaxText", "levanter": "Levanter"}
    each = ((names[name], *item) for name, found in result["frameworks"].items() for item in found["modes"].items())
    rows = [[name, MODES[mode], *cells(of)] for name, mode, of in each if "step_ms" in of]
    return markdown(("", "", "step", "temporary device memory"), *rows)


def parse() -> argparse.Namespace:
    more = {"steps": 5, "frameworks": [*FRAMEWORKS], "modes": [*MODES], "child": False}
    made = bench.parser(__doc__, "trainers", **SIZES | more)
    options = made.parse_args()
    given = {"frameworks": options.frameworks, "modes": options.modes, "attention": [options.attention]}
    for (name, values), known in zip(given.items(), (FRAMEWORKS, MODES, ATTENTION), strict=True):
        if unknown := set(values) - known.keys():
            made.error(f"--{name}: {', '.join(sorted(unknown))}: not among {', '.join(known)}")
    return options


if __name__ == "__main__":
    options = parse()
    if options.child:
        bench.write(options, run_here(options))
    else:
        main(options)
