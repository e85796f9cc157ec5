"""The contexts in which the copies of a residual are traced: they say whose the copies are, and on which stream.

XLA deals copies to streams in turn, those to the host and those to the device alike. On one stream they wait for each
other, though the bus works both ways (docs/upstream.md#streams-and-slices). So each way gets a stream of its own, and
another one for pieces of rows.
"""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jax.experimental.xla_metadata import set_xla_metadata


class CopyScope(NamedTuple):
    """Of the residual with these names: contexts to trace its copies in."""

    names: str

    def to_host(self, in_pieces: bool = False) -> AbstractContextManager[Any]:
        return self._on_stream(3 if in_pieces else 1)

    def to_device(self, in_pieces: bool = False) -> AbstractContextManager[Any]:
        return self._on_stream(4 if in_pieces else 2)

    @contextlib.contextmanager
    def _on_stream(self, number: int) -> Iterator[None]:
        with jax.named_scope(f"jaxoffload({self.names})"), set_xla_metadata(_xla_stream_annotation=str(number)):
            yield
