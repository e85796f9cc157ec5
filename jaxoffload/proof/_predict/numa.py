"""At which NUMA node each GPU is, and on which node the memory lies that is pinned for it.

Copies between sockets are slow: eight H100s that copied at once had 33 GiB/s each with memory on their own nodes, and
13.5 without (https://github.com/openxla/xla/pull/21708). XLA pins a GPU's memory on the node that sysfs names. Where it
names none, as in many virtual machines, the driver decides.
"""

import ctypes
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from ..._text import GIB

_PCI, _NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}  # the system call; without target nodes it moves nothing
_PAGES = 256  # of an array, at equal distances
_FAR = 0.1  # of the pages

_BOUND = (
    "Start one process for each GPU, bound to its node: `numactl --cpunodebind=NODE --membind=NODE`; `nvidia-smi topo "
    "-m` lists the nodes."
)


class Place(NamedTuple):
    """A GPU by its number in this process.

    Attributes:
      node: its NUMA node; None where the machine does not say.
      pinned: pages of memory that was pinned for it, by node; empty where the kernel does not say.
    """

    gpu: int
    node: int | None
    pinned: Counter[int]


def places(devices: Sequence[Any]) -> list[Place]:
    """Return where GPUs are, and where what is pinned for them lies, by a quarter of a GiB for each."""
    found = []
    for number, device in enumerate(devices):
        host = SingleDeviceSharding(device, memory_kind="pinned_host")
        try:
            array = jax.device_put(jnp.ones(GIB // 4, jnp.uint8), host)
            pinned = pages(int(array.unsafe_buffer_pointer()), array.nbytes)
        except jax.errors.JaxRuntimeError:  # the pool is full, or JAX does not say where the array is
            pinned = Counter()
        found.append(Place(number, node_of(_bus_id(device)), pinned))
    return found


def _bus_id(device: Any) -> str:
    """Return a GPU's address on the PCI bus, such as "0000:1b:00.0"; empty if the driver does not tell."""
    text, number = ctypes.create_string_buffer(32), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    failed = driver.cuDeviceGet(ctypes.byref(number), device.local_hardware_id)
    failed = failed or driver.cuDeviceGetPCIBusId(text, len(text), number)
    return "" if failed else text.value.decode().lower()


def node_of(bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device; None where sysfs names none."""
    try:
        node = int((_PCI / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def pages(address: int, size: int) -> Counter[int]:
    """Return on which nodes some pages of a range lie."""
    number = _MOVE_PAGES.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return Counter()
    count = min(_PAGES, max(1, size // 2**16))  # in pages of at most 64 KiB
    addresses = (ctypes.c_void_p * count)(*(address + n * (size // count) for n in range(count)))
    nodes = (ctypes.c_int * count)()
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, 0, ctypes.c_ulong(count), addresses, None, nodes, 0):
        return Counter()  # a container may not ask
    return Counter(node for node in nodes if node >= 0)


def summary(found: Sequence[Place]) -> str:
    """Return a line for each GPU, and what to do if memory is far from its GPU."""
    if len([*_NODES.glob("node[0-9]*")]) < 2:
        return "This machine names no second NUMA node."
    lines = []
    for gpu, node, pinned in found:
        at = "sysfs names no node" if node is None else f"node {node}"
        on = " and ".join(f"node {n}" for n in sorted(pinned)) or "a node that the kernel does not tell"
        lines.append(f"GPU {gpu}: {at}; memory that is pinned for it: on {on}")
    is_far = lambda place: sum(n for node, n in place.pinned.items() if node != place.node) > _FAR * _PAGES
    if far := [place for place in found if place.node is not None and is_far(place)]:
        which = ", ".join(str(place.gpu) for place in far)
        lines.append(f"Copies of GPU {which} cross to another node, and are slower for it. {_BOUND}")
    if any(place.node is None for place in found):
        lines.append(f"XLA cannot pin memory near a GPU of which sysfs names no node. {_BOUND}")
    return "\n".join(lines)
