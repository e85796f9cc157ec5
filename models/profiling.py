"""train.profile_steps: some steps of a run are traced, and a page about them is written beside the metrics."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

import jaxoffload
from jaxoffload import proof
from models.config import Config
from models.processes import say
from models.step import Program, State

Step = Callable[[State, jax.Array], tuple[State, dict[str, jax.Array]]]


@contextlib.contextmanager
def profiled(config: Config, made: Program, compiled: jax.stages.Compiled, start: int) -> Iterator[Step]:
    """Yield the compiled step, which process 0 profiles in the steps that the config names.

    It waits for those steps and writes profile.html. What the run does between them is in the trace, not on the page.

    Args:
      config: the run's.
      made: the program of the step.
      compiled: the compiled step.
      start: the number of steps taken before the first call.
    """
    steps = config.train.profile_steps
    if steps is None or start > steps[0] or jax.process_index():
        yield compiled
        return
    folder, taken = Path(config.train.out) / "trace", itertools.count(start)
    with contextlib.ExitStack() as tracing:

        def step(state: State, tokens: jax.Array) -> tuple[State, dict[str, jax.Array]]:
            if (before := next(taken)) == steps[0]:
                jax.block_until_ready(state)
                tracing.enter_context(jax.profiler.trace(folder))
            results = compiled(state, tokens)
            if before + 1 == steps[1]:
                jax.block_until_ready(results)
                tracing.close()
                write_page(config, made, compiled, folder)
            return results

        yield step


def write_page(config: Config, made: Program, compiled: jax.stages.Compiled, trace: Path) -> None:
    """Write profile.html about the trace, and print a summary; print why if the trace cannot be read."""
    begin, end = config.train.profile_steps
    out = Path(config.train.out)
    try:
        found = proof.read_profile(trace, compiled, steps=end - begin)
    except (ValueError, FileNotFoundError) as why:  # such as no permission to use CUPTI: no reason to end the run
        say(f"train.profile_steps = [{begin}, {end}]: no profile.html, because {why}")
        return
    table = jaxoffload.residuals(made.loss, made.state.params, made.microbatch)
    title = f"{out.name}: steps {begin + 1} to {end}"
    (out / "profile.html").write_text(proof.page(title, proof.about(), table, profile=found))
    say(
        f"steps {begin + 1} to {end}: {found.step_ms} ms each, of which {found.exposed_ms} ms are exposed copies; by "
        f"residual and layer: {out / 'profile.html'}"
    )
