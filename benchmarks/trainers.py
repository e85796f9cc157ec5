"""MaxText's and Levanter's own training steps on one GPU: as they are, and with the lines of their recipes.

    python -m benchmarks.trainers [--frameworks maxtext levanter] [--modes recompute save offload ours] [--out FILE]

MaxText is its `train.py` with its configuration of Llama 3 8B for GPUs, of which `MAXTEXT` changes a few fields, and
with the XLA flags of its script for one machine. Levanter is its `Trainer` with its Llama and XLA's defaults: it ships
no flags for GPUs. Both update float32 weights by AdamW on synthetic tokens. Each mode is a process of its own.
`step_ms` is the median of the steps that the framework itself times, without the first; `temp_gib` and `all_gib` are
what XLA planned, `peak_gib` what JAX's allocator held at most, with the initialisation. Packages that a framework
imports and this step does not use may be absent: an empty module stands in for each, and `stand_ins` names them.
"""

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import bench
from benchmarks.bench import GIB, cells, markdown
from jaxoffload import Policy, offload, write_xla_flags

MODES = {
    "recompute": "everything recomputed",
    "save": "the matmuls and attention saved, as its GPU configuration says",
    "offload": "its offload",
    "ours": "**jaxoffload**, the same offloaded",
}
SKIPPED = 3  # the first steps, in which programs are compiled and clocks rise
SIZES = {
    "layers": 12,
    "batch": 2,
    "seq": 8192,
    "d_model": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "d_ff": 14336,
    "vocab": 128256,
}

# src/maxtext/configs/gpu/a3/llama_2_7b/1vm.sh, without the dump
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
MAXTEXT: dict[str, Any] = {
    "base_output_directory": "unused",
    "enable_goodput_recording": False,
    "log_config": False,
    "override_model_config": True,
    "packing": False,  # cuDNN's attention as JAX calls it knows no segments
    "skip_jax_distributed_system": True,
}
CUSTOM = {"remat_policy": "custom", "decoder_layer_input": "offload", "mlpwi_0": "offload"}
REMAT = {"recompute": {"remat_policy": "full"}, "save": {}, "offload": CUSTOM, "ours": CUSTOM}
# Of what these provide, a step of a dense model uses nothing: tokenizers, kernels for TPUs, storage, launchers.
ABSENT = {
    "maxtext": "drjax pathwaysutils tiktoken tokamax",
    "levanter": "aiobotocore aiohttp botocore datasets finelog fray gcsfs git google.api_core google.auth google.cloud "
    "iris msgspec pyarrow requests s3fs starlette tblib wandb zstandard",
}


class Anything(type):
    """A class whose attributes are such classes; instances hold nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__init__": lambda self, *args, **kwargs: None})


class StandIn(types.ModuleType):
    """A module in which every name is a class."""

    __path__: list[str] = []  # noqa: RUF012
    __getattr__ = Anything.__getattr__


class StandIns:
    """Finds an empty module for those of `names` that no other finder has."""

    def __init__(self, names: str):
        self.names, self.used = names.split(), set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not (of := [absent for absent in self.names if f"{name}.".startswith(f"{absent}.")]):
            return None
        self.used.update(of)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def maxtext(mode: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run MaxText's `train.main`, and return the facts of its step."""
    os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # without Google Cloud's packages
    import maxtext
    from maxtext.layers.nnx_decoders import NNXDecoder
    from maxtext.trainers.pre_train import train

    planned: list[Any] = []
    show = train.max_utils.print_compiled_memory_stats
    train.max_utils.print_compiled_memory_stats = lambda of, prefix="": (planned.append(of), show(of, prefix))
    if mode == "ours":

        def get_remat_policy(decoder: Any) -> Policy:
            return Policy.from_maxtext(decoder.config.tensors_on_device, decoder.config.tensors_to_offload)

        NNXDecoder.get_remat_policy = get_remat_policy
        train.loss_fn = offload(train.loss_fn)
    backend, file = jax.default_backend(), Path(folder, "metrics.jsonl")
    fields = MAXTEXT | REMAT[mode] | {
        "attention": "cudnn_flash_jax" if backend == "gpu" else "dot_product",
        "hardware": backend,
        "steps": options.steps + SKIPPED,
        "metrics_file": file,
        "base_output_directory": folder,
        "per_device_batch_size": options.batch,
        "max_target_length": options.seq,
        "base_num_decoder_layers": options.layers,
        "base_emb_dim": options.d_model,
        "base_num_query_heads": options.heads,
        "base_num_kv_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "base_mlp_dim": options.d_ff,
        "vocab_size": options.vocab,
    }
    config = Path(maxtext.__file__).parent / "configs/gpu/models/llama3_8b.yml"
    train.main(["", str(config), *(f"{name}={value}" for name, value in fields.items())])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    facts = {"ms": [1e3 * of["perf/step_time_seconds"] for of in lines], "loss": [of["learning/loss"] for of in lines]}
    return facts | {"memory": planned[0], "attention": fields["attention"]}


def levanter(mode: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run Levanter's `Trainer.train_step`, and return the facts of the step."""
    import equinox as eqx
    import haliax as hax
    import jmp
    import levanter.tracker
    from haliax.nn import ScanCheckpointPolicy
    from levanter.checkpoint import CheckpointerConfig
    from levanter.distributed import DistributedConfig
    from levanter.layers.attention import default_attention_type
    from levanter.models.llama import LlamaConfig
    from levanter.models.lm_model import LmExample
    from levanter.optim.config import AdamConfig
    from levanter.trainer import Trainer, TrainerConfig

    policy = Policy({"scan(layer)__carry": "offload"})

    class Offload(ScanCheckpointPolicy):
        def checkpoint(self, carry_name: str, input_name: str, layer: Any) -> Any:
            return eqx.filter_checkpoint(layer, policy=policy, prevent_cse=False)

    def loss(model: Any, example: Any, *, key: Any = None) -> Any:
        return model.compute_next_token_loss(example, key=key)

    theirs = {"recompute": True, "offload": ScanCheckpointPolicy(save_carries="offload")}
    model = LlamaConfig(
        max_seq_len=options.seq,
        hidden_dim=options.d_model,
        intermediate_dim=options.d_ff,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        gradient_checkpointing=Offload() if mode == "ours" else theirs[mode],
    )
    config = TrainerConfig(
        id="benchmark",
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        tracker=(),
        log_dir=Path(folder),
        log_jaxprs=False,
        log_xla_hlo=False,
        checkpointer=CheckpointerConfig(base_path=folder),
        train_batch_size=options.batch,
        num_train_steps=options.steps + SKIPPED,
        require_accelerator=False,
        distributed=DistributedConfig(initialize_jax_distributed=False),
    )
    config.initialize()
    optimizer = AdamConfig().build(config.num_train_steps)
    with Trainer(config, optimizer, offload(loss) if mode == "ours" else loss, add_default_hooks=False) as trainer:
        Vocab = hax.Axis("vocab", options.vocab)
        state = trainer.initial_state(jax.random.key(0), model_init=lambda: model.build(Vocab, key=jax.random.key(1)))
        axes = config.TrainBatch, model.max_Pos
        example = LmExample(hax.random.randint(jax.random.key(2), axes, 0, options.vocab), hax.ones(axes))
        step = trainer._jit_train_step_fn_no_hook.lower(state, (example,), {}).compile()
        ms, losses = [], []
        for _ in range(config.num_train_steps):
            info = trainer.train_step(state, example)
            state = info.state
            ms.append(1e3 * info.step_duration)
            losses.append(info.loss)
    found = importlib.util.find_spec("transformer_engine")
    attention = str(default_attention_type()) if found or jax.default_backend() != "gpu" else "jax_flash"
    return {"ms": ms, "loss": losses, "memory": step.memory_analysis(), "attention": attention}


FRAMEWORKS: dict[str, Callable[..., dict[str, Any]]] = {"maxtext": maxtext, "levanter": levanter}


def flags_of(framework: str, mode: str, folder: str) -> str:
    """Return the XLA flags of a mode."""
    if mode == "ours":
        return write_xla_flags(Path(folder, "copies.pbtxt"))
    return " ".join(MAXTEXT_FLAGS.split()) if framework == "maxtext" else ""


def run_child(options: argparse.Namespace) -> dict[str, Any]:
    """Run a mode in this process, whose XLA flags are set, and return its facts."""
    bench.prepare()
    ((framework,), (mode,)) = options.frameworks, options.modes
    sys.meta_path.append(stand_ins := StandIns(ABSENT[framework]))
    with tempfile.TemporaryDirectory() as folder:
        of = FRAMEWORKS[framework](mode, options, folder)
    times = of["ms"][SKIPPED:]
    device = jax.local_devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    facts = {"step_ms": statistics.median(times), "spread_ms": [min(times), max(times)], "peak_gib": peak / GIB}
    facts = json.loads(json.dumps(facts), parse_float=lambda x: round(float(x), 4)) | bench.sizes_gib(of["memory"])
    about = {"device": f"1 {device.device_kind} ({device.platform})", "versions": bench.versions()}
    name = {"levanter": "marin-levanter"}.get(framework, framework)
    about["versions"] |= {name: importlib.metadata.version(name)}
    about |= {"attention": of["attention"], "stand_ins": sorted(stand_ins.used)}
    return {"about": about, "facts": facts | {"losses": of["loss"]}}


def run(framework: str, mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a mode in a process of its own, and return what it found."""
    with tempfile.TemporaryDirectory() as folder:
        flags, out = flags_of(framework, mode, folder), Path(folder, "facts.json")
        sizes = [f"--{name}={getattr(options, name)}" for name in (*SIZES, "steps")]
        chosen = ["--frameworks", framework, "--modes", mode, "--child", "--out", str(out)]
        environment = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ | {"XLA_FLAGS": flags}
        command = [sys.executable, "-m", "benchmarks.trainers", *sizes, *chosen]
        done = subprocess.run(command, env=environment, stdout=sys.stderr, stderr=subprocess.STDOUT)
        if done.returncode:
            return {"facts": {"cannot": f"exit status {done.returncode}"}}
        return json.loads(out.read_text())


def ratios(modes: dict[str, Any]) -> dict[str, Any]:
    """Return ratios of step times and memory, and how far the last losses of ours and of their offload are apart."""
    found: dict[str, Any] = bench.ratios(modes, [("ours", other) for other in ("offload", "recompute", "save")])
    losses = [modes[mode]["losses"] for mode in ("offload", "ours") if "losses" in modes.get(mode, {})]
    if len(losses) == 2:
        theirs, ours = losses
        found["same losses"] = theirs == ours
        found["last losses apart"] = abs(theirs[-1] - ours[-1]) / theirs[-1]
    return found


def main(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"device": None, "versions": {}}
    result |= {"command": bench.command_of("trainers"), "commit": options.commit}
    result |= {"shape": {name: getattr(options, name) for name in SIZES}, "frameworks": {}}
    for framework in options.frameworks:
        of = result["frameworks"][framework] = {"modes": {}}
        for mode in options.modes:
            if framework == "levanter" and mode == "save":
                continue  # its layers name no values that it could save
            found = run(framework, mode, options)
            about, of["modes"][mode] = found.pop("about", {}), found["facts"]
            print(framework, mode, found["facts"], file=sys.stderr, flush=True)
            result["device"] = about.pop("device", result["device"])
            result["versions"] |= about.pop("versions", {})
            of |= about
            of["ratios"] = ratios(of["modes"])
            bench.write(options, result)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """Return the results as a Markdown table."""
    each = [(name, mode, facts) for name, of in result["frameworks"].items() for mode, facts in of["modes"].items()]
    names = {"maxtext": "MaxText", "levanter": "Levanter"}
    rows = [[names[name], MODES[mode], *cells(of)] for name, mode, of in each if "step_ms" in of]
    return markdown(("", "", "step", "temporary device memory"), *rows)


def parse() -> argparse.Namespace:
    more = {"steps": 6, "frameworks": [*FRAMEWORKS], "modes": [*MODES], "child": False}
    made = bench.parser(__doc__, "trainers", **SIZES | more)
    options = made.parse_args()
    for name, known in (("frameworks", FRAMEWORKS), ("modes", MODES)):
        if unknown := set(getattr(options, name)) - known.keys():
            made.error(f"--{name}: {', '.join(sorted(unknown))}: not among {', '.join(known)}")
    return options


if __name__ == "__main__":
    options = parse()
    if options.child:
        options.out.write_text(json.dumps(run_child(options)))
    else:
        main(options)
