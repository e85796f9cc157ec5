"""Faults that tests plant: `verify` has to find them."""

import jax

from jaxoffload._engine.layers import passes
from jaxoffload._jax import on_host


def rows_in_wrong_order(monkeypatch):
    real = passes.take_row
    reversed_rows = lambda stack, i: real(stack, stack.shape[0] - i if on_host(jax.typeof(stack)) else i)
    monkeypatch.setattr(passes, "take_row", reversed_rows)


def a_host_write_is_skipped(monkeypatch):
    real = passes.put_row
    monkeypatch.setattr(passes, "put_row", lambda s, x, i: s if on_host(jax.typeof(s)) else real(s, x, i))
