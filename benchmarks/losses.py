"""Training with offload has the losses of training with the same residuals saved, bit for bit.

    python -m benchmarks.losses [--config configs/llama-1b.yaml] [--steps 200] [section.key=value ...]
    python -m benchmarks.losses --config configs/tiny-moe.yaml --out benchmarks/results/losses-moe.json \
        --variants model.grouped=ragged model.grouped=mosaic "model.grouped=te model.quantize=fp8" -- \
        model.dtype=bfloat16 model.d_model=256 model.heads=4 model.d_expert=256 train.batch_size=8 train.seq_len=256

Runs `models.train` twice, the second time with each `offload` of the config's `remat:` turned into `save`, both under
XLA's deterministic options, and compares the losses of all steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import peers
from jaxoffload import Policy
from models.config import load

# Of the same arithmetic the same bits: no atomics, no choice of kernels by their speed, bfloat16 where it is written.
# XLA's attention, whose scores take room, and so a short batch: with deterministic operations and `compiler_options()`
# a step with cuDNN's fails (jaxlib 0.11.2, with nothing offloaded too: IndexError, raw_hash_map<>::at).
SIZED = ["model.attention=xla", "train.batch_size=1", "train.seq_len=4096"]
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 --xla_allow_excess_precision=false"


def main() -> None:
    options = parse()
    base = load(options.config, options.overrides)
    if not overrides_to_save(base.remat):
        sys.exit(f"benchmarks.losses: {options.config} offloads nothing")
    lines = []
    for variant in options.variants:
        chosen = variant.split()
        saved = overrides_to_save(load(options.config, [*options.overrides, *chosen]).remat)
        runs = {"offload": train(options, chosen), "save": train(options, [*chosen, *saved])}
        losses = {how: [row["loss"] for row in rows] for how, rows in runs.items()}
        peaks = {how: round((rows[-1]["device_peak_bytes"] or 0) / 2**30, 2) for how, rows in runs.items()}
        lines.append(
            {
                "overrides": variant,
                "losses that differ": sum(a != b for a, b in zip(losses["offload"], losses["save"], strict=True)),
                "losses": [round(loss, 4) for loss in losses["save"]],
                "device_peak_gib": peaks,
            }
        )
        result = {**peers.provenance("losses", options.commit), "steps": options.steps, "lines": lines}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    sys.exit(1 if any(line["losses that differ"] for line in lines) else 0)


def overrides_to_save(policy: Policy) -> list[str]:
    """Of a config: each `offload` in its policy turned into `save`; none, if there is none.

    All patterns are written again, in their order, for those that are appended win.
    """
    saved = lambda decision: "save" if decision == "offload" else decision
    fields = [f"remat.{field}=save" for field in ("default", "dots") if getattr(policy, field) == "offload"]
    if not fields and all(decision != "offload" for _, decision in policy.rules):
        return []
    patterns = [f"remat.residuals[{pattern}]={saved(decision)}" for pattern, decision in policy.rules]
    return ["remat.offload_modules=[]", *patterns, *fields]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of the config, as for models.train")
    parser.add_argument("--config", default="configs/llama-1b.yaml")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--variants", nargs="+", default=[""], help="further overrides; a pair of runs for each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/losses.json"))
    parser.add_argument("--commit", default=peers.head(), help="recorded beside the numbers")
    return parser.parse_args()


def train(options: argparse.Namespace, overrides: list[str]) -> list[dict[str, Any]]:
    """The training lines of a fresh run's metrics.jsonl."""
    with tempfile.TemporaryDirectory() as out:
        sized = [*SIZED, f"train.steps={options.steps}", "train.log_every=1", f"train.checkpoint_every={options.steps}"]
        command = [sys.executable, "-m", "models.train", options.config, f"train.out={out}", *sized]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
        done = subprocess.run([*command, *options.overrides, *overrides], env=os.environ | {"XLA_FLAGS": flags})
        if done.returncode:
            sys.exit(f"benchmarks.losses: models.train failed with exit status {done.returncode}")
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
