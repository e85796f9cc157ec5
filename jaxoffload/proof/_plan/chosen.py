"""Choose from a curve: the fastest by `predict` of those that fit, by XLA's memory where XLA can be asked."""

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

import jax

from ..._compiler_options import compiler_options
from ..._policy import Policy
from ..._tracing import Trial, under
from .._predict.predict import Prediction
from .._program.memory import memory_plan
from .._program.results import run_of
from .choices import Choice

_NEAR = 2  # choices on either side of the limit are looked at
_MOST_SIZED = 8
_PECULIAR = 0.05  # of the limit: XLA runs kernels of two layers at once, say
_MOVES = 0.01  # of a step: for less nothing is moved where moving nothing fits
_GAIN = 0.003  # of a step: for less no further choice is compiled


def chosen(
    curve: Sequence[Choice],
    limit: int,
    host_limit: int,
    predicted: Callable[[Choice], Prediction],
    size_of: Callable[[Choice], int],
    sizes: dict[Choice, int],
) -> Choice | None:
    """Return the fastest choice found that fits in `limit` bytes per device, or None.

    The more bytes a choice takes, the less time: so those are predicted that are near the limit, of those that move
    something and of those that move nothing. What one takes more or less corrects the others of its kind, above all
    those that move in as many layers, until the choice is one whose size is known.

    `sizes`: those that are known, to which those of the choices that are looked at are added.
    """
    kinds = [[choice for choice in curve if bool(choice.host) is moves] for moves in (True, False)]

    def corrected(choice: Choice, bytes_of: Callable[[Choice], int]) -> int:
        if choice in sizes:
            return sizes[choice]
        alike = [other for other in sizes if bool(other.host) is bool(choice.host)]
        more = {other.layers: sizes[other] - bytes_of(other) for other in alike}
        of_any = min((found for found in more.values() if found < _PECULIAR * limit), default=0)
        return bytes_of(choice) + more.get(choice.layers, of_any)

    def size(choice: Choice) -> int:
        return corrected(choice, lambda choice: predicted(choice).memory.total)

    def fits(choice: Choice) -> bool:
        return size(choice) <= limit and predicted(choice).host <= host_limit

    def at_the_limit(kind: Sequence[Choice]) -> list[Choice]:
        """Return those on either side of the limit. What is predicted of these corrects the estimates of those beside
        them, until they stay."""
        more = dict[int, int]()  # by estimated bytes
        while True:
            error = lambda choice: more[min(more, key=lambda size: abs(size - choice.device))] if more else 0
            inside = {c: corrected(c, lambda c: c.device + error(c)) <= limit for c in kind}
            near = [c for c in kind if inside[c]][-_NEAR:] + [c for c in kind if not inside[c]][:_NEAR]
            if more.keys() >= {c.device for c in near}:
                return near
            more |= {c.device: predicted(c).memory.total - c.device for c in near}

    def best() -> Choice:
        """Return the fastest that seems to fit, or else the smallest."""
        near = [choice for kind in kinds for choice in at_the_limit(kind)]
        return _fastest(filter(fits, [*sizes, *near]), predicted, sizes) or min(near, key=size)

    most = len(sizes) + _MOST_SIZED
    while (choice := best()) not in sizes and len(sizes) < most:
        sizes[choice] = size_of(choice)
    return _fastest(filter(fits, sizes), predicted)


def _fastest(
    choices: Iterable[Choice], predicted: Callable[[Choice], Prediction], known: Container[Choice] = ()
) -> Choice | None:
    """Return the fastest of these; None if there are none. Those that move nothing come first if they are nearly as
    fast, and of these, or of all, those that are known."""
    ms = {choice: predicted(choice).step_ms for choice in choices}

    def as_fast(of: Collection[Choice], share: float) -> list[Choice]:
        least = min((ms[choice] for choice in of), default=0.0)
        return [choice for choice in of if ms[choice] <= (1 + share) * least]

    among = [choice for choice in as_fast(ms, _MOVES) if not choice.host] or [*ms]
    among = [choice for choice in as_fast(among, _GAIN) if choice in known] or among
    return min(among, key=ms.__getitem__, default=None)


def lowering(f: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return what lowers a step, or a loss and its gradient, for its arguments.

    A jitted step keeps what it donates; the arguments of any other step are donated.
    """
    run, is_loss = run_of(f, args)
    if is_loss or not hasattr(f, "lower"):
        return jax.jit(run, donate_argnums=() if is_loss else range(len(args))).lower
    return f.lower


def compiled_bytes(lower: Callable[..., Any], args: tuple[Any, ...], policy: Policy) -> int | None:
    """Return the bytes per device that XLA plans for a step under a policy; None if it does not say."""
    with under(whole_program=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        program = Trial(policy).traced(lower)(*args).compile(compiler_options("gpu"))
    found = memory_plan(program)
    if found is None:
        return None
    new = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + new + found.temp_size_in_bytes)


def are_on_gpus(args: Any) -> bool:
    """Return if arguments are on GPUs, here or described ones, for which a step can be compiled."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args)]
    if any(isinstance(getattr(s, "mesh", None), jax.sharding.AbstractMesh) for s in shardings):
        return False
    platforms = {device.platform for s in shardings if s is not None for device in s.device_set}
    return (platforms or {jax.default_backend()}) <= {"gpu", "cuda"}
