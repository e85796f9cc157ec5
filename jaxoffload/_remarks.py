"""What `offload` says of a program while `residuals` traces it, for the notes of the table."""

import contextlib

import jax


class Remarks:
    """The remarks on one trace. Each is another one, so that JAX traces again what it has traced before."""

    def __init__(self) -> None:
        self.texts: list[str] = []


# Part of every trace cache's key, as is `scope`.
_remarks = jax.make_user_context(None)


def listening(remarks: Remarks) -> contextlib.AbstractContextManager[None]:
    """Return a context in which remarks are gathered."""
    return _remarks(remarks)


def remark(text: str) -> None:
    """Hand a remark to what traces the program, if that listens."""
    if _remarks.value is not None:
        _remarks.value.texts.append(text)
