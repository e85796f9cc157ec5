"""Spellings of release 0.1.0: each works once more, and its warning names the user's line and the one to write."""

import warnings

import jax.numpy as jnp
import pytest

import jaxoffload
from jaxoffload import Policy, PolicyError, checkpoint, grouped, proof, tag

POLICY = Policy({"fc1": "save"})
layer = checkpoint(lambda x: jnp.sin(tag(2 * x, "fc1")), policy=POLICY)


def told(f):
    """Return what `f` returns, and the warning that it gives."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        out = f()
    (warning,) = found
    assert warning.category is DeprecationWarning and warning.filename == __file__
    return out, str(warning.message)


def test_check_with_the_policy_first():
    _, said = told(lambda: jaxoffload.check(POLICY, layer, jnp.ones(8)))
    assert said.endswith("write: check(f, *args, policy=policy)")
    other = Policy({"fc2": "save"})
    loose = checkpoint(lambda x: jnp.sin(tag(2 * x, "fc1")), policy=other, strict=False)
    with pytest.warns(DeprecationWarning), pytest.raises(PolicyError, match="the nearest is 'fc1'"):
        jaxoffload.check(other, loose, jnp.ones(8))


def test_check_refuses_what_is_not_a_policy():
    with pytest.raises(TypeError, match=r"check: policy must be a jaxoffload\.Policy, got {}"):
        jaxoffload.check(layer, jnp.ones(8), policy={})
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'policy'"):
        jaxoffload.check(layer, jnp.ones(8))


@pytest.mark.parametrize("name", ["grouped_matmul", "GroupedTensor"])
def test_names_that_moved_to_grouped(name):
    found, said = told(lambda: getattr(jaxoffload, name))
    assert found is getattr(grouped, name) and said.endswith(f"write: from jaxoffload.grouped import {name}")
    assert name not in dir(jaxoffload)


def test_from_import_of_a_name_that_moved():
    with pytest.warns(DeprecationWarning, match="write: from jaxoffload.grouped import grouped_matmul") as found:
        from jaxoffload import grouped_matmul
    assert {warning.filename for warning in found} == {__file__}
    assert grouped_matmul is grouped.grouped_matmul


def test_xla_flags_writes():
    found, said = told(lambda: jaxoffload.xla_flags)
    assert found is jaxoffload.write_xla_flags and said.endswith("write: jaxoffload.write_xla_flags(profile)")


def test_fits_is_predict():
    found, said = told(lambda: proof.fits)
    assert found is proof.predict and said.endswith("write: jaxoffload.proof.predict(f, *args, machine=machine)")
    with pytest.warns(DeprecationWarning, match="write: jaxoffload.proof.predict"):
        assert proof.Fits is proof.Prediction


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="module 'jaxoffload' has no attribute 'grouped_matmull'"):
        jaxoffload.grouped_matmull  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'jaxoffload\.proof' has no attribute 'room'"):
        proof.room  # noqa: B018
