"""Record what `jax.profiler` reports about real steps, for test_streams.py: python tests/record_traces.py FOLDER COMMIT

It needs an NVIDIA GPU. Each file holds the events of the GPU's streams, the program that ran, where both came from, and
what `profile_of` made of them.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path

import jax

from benchmarks.bench import provenance
from jaxoffload import compiler_options, proof
from jaxoffload.proof._profile import profile_of
from jaxoffload.proof._program.hlo import host_copies, parse
from jaxoffload.proof._program.target import target_of
from jaxoffload.proof._program.trace import traced
from models.train import step_for

SMALL = ["model.dtype=bfloat16", "train.batch_size=2", "train.seq_len=2048", "remat.min_offload_bytes=0"]
STEPS = {
    "dense": ["configs/llama-1b.yaml", "model.layers=6", "model.vocab_size=2048", *SMALL],
    "moe": [
        "configs/tiny-moe.yaml",
        *SMALL,
        *["model.d_model=1024", "model.heads=8", "model.d_ff=2048", "model.d_expert=1024", "model.layers=5"],
        *["model.attention=cudnn", "model.grouped=auto", "train.loss_chunk=1024"],
    ],
}
TAKEN = 2


def record(name: str, folder: Path) -> proof.Profile:
    step, args, _, _ = step_for(*STEPS[name])
    target = target_of(step, args)
    program, arrays = target.compiled(compiler_options), target.arrays
    jax.block_until_ready(program(*arrays))
    events = traced(lambda: [jax.block_until_ready(program(*arrays)) for _ in range(TAKEN)])
    text = "\n".join(line[:4000] for line in program.as_text().splitlines())  # without the kernels' code
    found = profile_of(events, host_copies(parse(text)), TAKEN, jax.devices()[0].device_kind)
    known = provenance("", argparse.Namespace(commit=sys.argv[2]))
    kept = {**known, "command": " ".join(["python", *sys.argv]), "of": STEPS[name]}
    kept |= {
        "steps": TAKEN,
        "profile": {"totals": [total._asdict() for total in found.totals]},
        "events": events,
        "program": text,
    }
    with gzip.open(folder / f"{name}.json.gz", "wt") as file:
        json.dump(kept, file)
    return found


if __name__ == "__main__":
    for name in STEPS:
        print(name, record(name, Path(sys.argv[1])), sep="\n")
