"""Options with the times of a compiled program's instructions. test_program.py has what XLA makes of them."""

import jax
import pytest

from jaxoffload import compiler_options
from jaxoffload.proof import scheduling_options


def test_the_options_are_the_others_with_a_longer_profile():
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    before, after = compiler_options("gpu"), scheduling_options(program, "gpu")
    assert after["fdo_profile"].startswith(before["fdo_profile"]) and len(after["fdo_profile"]) > len(
        before["fdo_profile"]
    )
    assert after | {"fdo_profile": b""} == before | {"fdo_profile": b""}
    assert scheduling_options(program, "cpu") == {}
    late = scheduling_options(program, "gpu", copy_ms=2)["fdo_profile"]
    assert late.startswith(compiler_options("gpu", copy_ms=2)["fdo_profile"])


def test_what_is_not_compiled_is_refused():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(TypeError, match=r"^scheduling_options: compiled must be what .*compile\(\) returns, got "):
        scheduling_options(lowered, "gpu")
    with pytest.raises(ValueError, match="backend 'gpus' is not one of"):
        scheduling_options(lowered.compile(), "gpus")
