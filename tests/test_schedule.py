"""The schedule of pipeline stages: what runs when, what is in flight, and what idles."""

import pytest

from jaxoffload._engine.stages.schedule import Run, Schedule

EACH = [Schedule(p, v, m) for p in (1, 2, 3, 4) for v in (1, 2, 3) for m in (1, 3, 4, 5, 12)]

TWO_STAGES = """
stage 0  forward   0 1 2 3 . . .
         backward  . . . 0 1 2 3
stage 1  forward   . 0 1 2 3 . .
         backward  . . 0 1 2 3 .
"""

TWO_VIRTUAL_STAGES = """
stage 0  forward   0a 1a 0b 1b 2a 3a 2b 3b  .  .  .  .  .
         backward   .  .  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a
stage 1  forward    . 0a 1a 0b 1b 2a 3a 2b 3b  .  .  .  .
         backward   .  .  .  . 0b 1b 0a 1a 2b 3b 2a 3a  .
"""


@pytest.mark.parametrize(
    "schedule, drawing", [(Schedule(2, 1, 4), TWO_STAGES), (Schedule(2, 2, 4), TWO_VIRTUAL_STAGES)]
)
def test_the_drawing(schedule, drawing):
    assert str(schedule) == drawing.strip("\n")


@pytest.mark.parametrize("sizes", [(0, 1, 4), (2, 0, 4), (2, 1, 0), (2, 1, 1.5)])
def test_sizes_that_are_not_whole_numbers_above_0(sizes):
    with pytest.raises(ValueError, match=r"^Schedule: .* is not allowed; use a whole number above 0"):
        Schedule(*sizes)


def at(schedule, direction):
    """Return run -> (stage, tick)."""
    places = [(stage, tick) for stage in range(schedule.stages) for tick in range(schedule.ticks)]
    return {run: place for place in places if (run := getattr(schedule, direction)(*place))}


@pytest.mark.parametrize("schedule", EACH, ids=repr)
def test_each_run_happens_once_when_what_it_needs_is_there(schedule):
    forward, backward = at(schedule, "forward"), at(schedule, "backward")
    every = {Run(m, c) for m in range(schedule.microbatches) for c in range(schedule.chunks)}
    assert forward.keys() == backward.keys() == every
    for run in every:
        (stage, begun), (same, ended) = forward[run], backward[run]
        assert stage == same == run.chunk % schedule.stages
        assert (begun, ended) == (schedule.forward_tick(run), schedule.backward_tick(run))
        if before := forward.get(run._replace(chunk=run.chunk - 1)):
            assert before == ((stage - 1) % schedule.stages, begun - 1)  # one exchange with the neighbour
        if behind := backward.get(run._replace(chunk=run.chunk + 1)):
            assert behind == ((stage + 1) % schedule.stages, ended - 1)
        else:
            assert ended == begun + 1


@pytest.mark.parametrize("schedule", EACH, ids=repr)
def test_a_ring_of_slots_keeps_each_run_until_its_backward_pass(schedule):
    forward, backward = at(schedule, "forward"), at(schedule, "backward")
    for stage in range(schedule.stages):
        alive = [range(t, backward[run][1] + 1) for run, (s, t) in forward.items() if s == stage]
        counts = [sum(tick in ticks for ticks in alive) for tick in range(schedule.ticks)]
        assert schedule.in_flight(stage) == max(counts) <= schedule.slots
        slots = [(tick, ticks[0] % schedule.slots) for ticks in alive for tick in ticks]
        assert len(set(slots)) == len(slots)
        if schedule.virtual_stages == 1:
            assert max(counts) == min(2 * (schedule.stages - stage), schedule.microbatches)


@pytest.mark.parametrize("schedule", EACH, ids=repr)
def test_the_bubble(schedule):
    """By the clock, if a layer's backward pass takes twice as long as its forward pass."""
    p, v, m = schedule.stages, schedule.virtual_stages, schedule.microbatches
    ticks = range(schedule.ticks)
    times = [[(of(s, t) is not None) for s in range(p)] for of in (schedule.forward, schedule.backward) for t in ticks]
    clock = sum(any(f) + 2 * any(b) for f, b in zip(times[: len(ticks)], times[len(ticks) :], strict=True))
    assert schedule.bubble == pytest.approx(1 - 3 * m * v / clock)
    expected = pytest.approx((p - 1) / (v * m + p - 1))
    assert schedule.bubble == expected if v == 1 or m % p == 0 else schedule.bubble > (p - 1) / (v * m + p - 1)
