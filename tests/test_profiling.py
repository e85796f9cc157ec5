"""train.profile_steps: which steps are traced, by which process, and what is written about them."""

import contextlib

import jax
import numpy as np
import pytest

from models import profiling
from models.config import Config, Train
from models.profiling import profiled

pytestmark = pytest.mark.claim("profile-steps")

ONE = np.float32(1)


@pytest.fixture
def seen(monkeypatch):
    """What happens, in order: steps, the trace's begin and end, and the page."""
    seen = []

    @contextlib.contextmanager
    def trace(folder):
        seen.append(f"trace to {folder}")
        yield
        seen.append("end")

    monkeypatch.setattr(jax.profiler, "trace", trace)
    monkeypatch.setattr(profiling, "write_page", lambda *_: seen.append("page"))
    return seen


def take(seen, start, steps, profile_steps):
    def compiled(state, tokens):
        seen.append(int(state) + 1)
        return state + 1, {}

    state = start * ONE
    with profiled(Config(train=Train(profile_steps=profile_steps, out="out")), None, compiled, start) as step:
        for _ in range(steps):
            state, _ = step(state, ONE)


def test_the_steps_after_the_first_number_are_traced_to_the_second(seen):
    take(seen, 0, 4, (1, 3))
    assert seen == [1, "trace to out/trace", 2, 3, "end", "page", 4]


@pytest.mark.parametrize("start, traced", [(0, True), (2, True), (3, False), (9, False)])
def test_a_run_that_continues_takes_all_of_them_or_profiles_nothing(seen, start, traced):
    take(seen, start, 9, (2, 4))
    steps = [x for x in seen if isinstance(x, int)]
    assert steps == list(range(start + 1, start + 10)) and ("page" in seen) == traced
    if traced:
        assert seen[seen.index("end") - 3 :][:3] == ["trace to out/trace", 3, 4]


def test_nothing_is_traced_unasked_or_by_another_process(seen, monkeypatch):
    take(seen, 0, 2, None)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    take(seen, 0, 2, (0, 2))
    assert seen == [1, 2, 1, 2]


def test_a_run_that_ends_before_its_profile_does_has_no_page_and_leaves_no_trace_on(seen):
    take(seen, 0, 2, (1, 9))
    assert seen == [1, "trace to out/trace", 2, "end"]
