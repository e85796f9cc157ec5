"""A TCP relay for JAX's client, which stays connected when the far side is gone.

If process 0 dies, jaxlib's client of its coordination service sees the connection close, and aborts the process in C++
with a stack trace (xla/pjrt/distributed/client.h; no argument of `jax.distributed.initialize` prevents it). Through the
relay it waits for an answer instead, which gives models/peers.py the time to say which process is lost.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_LIMIT, _RETRY = 60.0, 0.1  # seconds


def relay(host: str, port: int, failed: Callable[[str], None]) -> int:
    """Relay a port of the loopback interface to `host`:`port`, and return its number.

    `failed` is called with a message if `host`:`port` cannot be reached.
    """
    server = socket.create_server(("127.0.0.1", 0))
    _thread(_serve, server, host, port, failed)
    return server.getsockname()[1]


def _serve(server: socket.socket, host: str, port: int, failed: Callable[[str], None]) -> None:
    while True:
        near, _ = server.accept()
        try:
            far = _connected(host, port)
        except OSError as error:
            return failed(
                f"process 0 cannot be reached at {host}:{port}, where JAX connects to it ({error}): open its ports"
            )
        _thread(_pump, near, far)
        _thread(_pump, far, near)


def _connected(host: str, port: int) -> socket.socket:
    """Connect; try again for a while, because process 0 may begin to listen a little later."""
    until = time.monotonic() + _LIMIT
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_LIMIT)
            connection.settimeout(None)
            return connection
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_RETRY)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)


def _thread(f: Callable[..., Any], *args: Any) -> None:
    threading.Thread(target=f, args=args, name="relay", daemon=True).start()
