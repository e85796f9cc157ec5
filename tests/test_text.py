"""What messages share: the closest name, sizes in bytes, the type of an array."""

import jax.numpy as jnp
import pytest

from jaxoffload._text import array_type, nearest, readable, short


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**41, "2.00 TiB"),
    ],
)
def test_bytes_are_in_the_largest_unit_that_they_reach(size, text):
    assert readable(size) == text


def test_the_closest_name_is_found_whatever_its_case():
    assert nearest("FC1", ["attn", "fc1", "fc2"]) == "; the nearest is 'fc1'"
    assert nearest("ofload", ["save", "offload"]) == "; the nearest is 'offload'"
    assert nearest("xyz", ["save", "offload"]) == ""


def test_an_array_is_told_by_its_dtype_and_shape():
    assert array_type(jnp.ones((8, 4), jnp.bfloat16)) == "bfloat16[8, 4]"
    assert array_type(None) == "None"


def test_a_long_value_is_cut():
    assert short("x" * 200) == "'" + "x" * 96 + "..."
