"""Host copies of a profiled GPU step: how long they take, and how much of that nothing hides.

    with jax.profiler.trace(FOLDER):
        jax.block_until_ready(step(...))
    python -m benchmarks.streams FOLDER

What counts as hidden: `jaxoffload.proof._trace`, whose reader the other benchmarks use too.
"""

import argparse
import json
import sys
from pathlib import Path

from jaxoffload.proof._program.trace import DIRECTIONS as DIRECTIONS
from jaxoffload.proof._program.trace import Event as Event
from jaxoffload.proof._program.trace import by_kernel as by_kernel
from jaxoffload.proof._program.trace import read as read
from jaxoffload.proof._program.trace import summary as summary
from jaxoffload.proof._program.trace import traced as traced

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of jax.profiler.trace")
    try:
        gpus = read(parser.parse_args().folder)
    except FileNotFoundError as why:
        sys.exit(f"streams: {why}")
    print(json.dumps({gpu: summary(events) for gpu, events in gpus.items()}, indent=1))
