r"""Whether training with offload has the same losses, bit for bit, as training with these residuals saved; or, with
`--interleaved`, as training with one microbatch after another.

    python -m benchmarks.losses [--config configs/llama-1b.yaml] [--steps 200] [section.key=value ...]
    python -m benchmarks.losses --interleaved --out benchmarks/results/losses-interleaved.json \
        train.batch_size=4 train.grad_accumulation=4

It runs `models.train` twice under XLA's deterministic options, the second time with every `offload` in the config's
`remat:` replaced by `save`, or with `train.interleave=false`, and compares the losses of all steps. The exit status is
1 if a loss differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import bench
from jaxoffload import Policy
from models.config import load

# Under deterministic operations and `compiler_options()`, a step with cuDNN's attention fails even without offload
# (jaxlib 0.11.2: IndexError, raw_hash_map<>::at). XLA's attention stores its scores, hence the small batch.
SIZES = ["model.attention=xla", "train.batch_size=1", "train.seq_len=4096"]
# No atomics, no kernels chosen by their speed, bfloat16 where the program says bfloat16.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 --xla_allow_excess_precision=false"


def main() -> None:
    options = parse()
    result = bench.provenance("losses", options) | {"steps": options.steps, "lines": []}
    for variant in options.variants:
        runs = {how: train(options, overrides) for how, overrides in compared(options, variant.split()).items()}
        losses = {how: [row["loss"] for row in rows] for how, rows in runs.items()}
        differ = sum(a != b for a, b in zip(*losses.values(), strict=True))
        rounded = [round(loss, 4) for loss in [*losses.values()][1]]
        result["lines"].append({"overrides": variant, "losses that differ": differ, "losses": rounded})
        bench.write(options, result)
    print(json.dumps(result, indent=1))
    sys.exit(1 if any(line["losses that differ"] for line in result["lines"]) else 0)


def parse() -> argparse.Namespace:
    more = {"config": "configs/llama-1b.yaml", "interleaved": False, "variants": [""]}
    parser = bench.parser(__doc__, "losses", steps=200, **more)
    parser.add_argument("overrides", nargs="*", help="of the config, as for models.train")
    return parser.parse_args()


def compared(options: argparse.Namespace, chosen: list[str]) -> dict[str, list[str]]:
    """Return the overrides of the two runs, by what the runs do."""
    if options.interleaved:
        return {"interleaved": chosen, "one after another": [*chosen, "train.interleave=false"]}
    if not (saved := overrides_to_save(load(options.config, [*options.overrides, *chosen]).remat)):
        sys.exit(f"benchmarks.losses: {options.config} offloads nothing")
    return {"offload": chosen, "save": [*chosen, *saved]}


def overrides_to_save(policy: Policy) -> list[str]:
    """Return config overrides that replace every `offload` of a policy by `save`; none if it offloads nothing.

    They repeat all patterns in their order, because a pattern that is appended wins over those before it.
    """
    saved = lambda decision: "save" if decision == "offload" else decision
    fields = [f"remat.{field}=save" for field in ("default", "dots") if getattr(policy, field) == "offload"]
    if not fields and all(decision != "offload" for _, decision in policy.rules):
        return []
    patterns = [f"remat.residuals[{pattern}]={saved(decision)}" for pattern, decision in policy.rules]
    return ["remat.offload_modules=[]", *patterns, *fields]


def train(options: argparse.Namespace, overrides: list[str]) -> list[dict[str, Any]]:
    """Run `models.train`, and return the lines with a loss in its metrics.jsonl."""
    with tempfile.TemporaryDirectory() as out:
        sizes = [*SIZES, f"train.steps={options.steps}", "train.log_every=1", f"train.checkpoint_every={options.steps}"]
        command = [sys.executable, "-m", "models.train", options.config, f"train.out={out}", *sizes]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}"
        done = subprocess.run([*command, *options.overrides, *overrides], env=os.environ | {"XLA_FLAGS": flags})
        if done.returncode:
            sys.exit(f"benchmarks.losses: models.train failed with exit status {done.returncode}")
        rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


if __name__ == "__main__":
    main()
