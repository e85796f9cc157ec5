"""Activation offload for JAX on NVIDIA GPUs: save, offload or recompute each named residual, and see that it is so."""

import typing as _typing

# Name residuals, and decide on them.
from ._engine.host.limit import HostPoolFull as HostPoolFull
from ._errors import Problem as Problem
from ._errors import UserError as UserError
from ._policy import Policy as Policy
from ._policy import PolicyError as PolicyError
from ._tag import scope as scope
from ._tag import tag as tag

# isort: split
# Run layers under a policy.
from . import grouped as grouped
from ._accumulate import accumulate as accumulate
from ._accumulate import evaluate as evaluate
from ._chain import chain as chain
from ._checkpoint import checkpoint as checkpoint
from ._compiler_options import compiler_options as compiler_options
from ._compiler_options import write_xla_flags as write_xla_flags
from ._engine.stages.schedule import Schedule as Schedule
from ._offload import offload as offload
from ._optimizer.host_optimizer import host_optimizer as host_optimizer
from ._optimizer.masters import join_masters as join_masters
from ._optimizer.masters import split_masters as split_masters
from ._scan import scan as scan

# isort: split
# See what is kept, and verify it.
from ._check import check as check
from .proof import Plan as Plan
from .proof import machine as machine
from .proof import plan as plan
from .proof import profile as profile
from .proof import verify as verify
from .proof._residuals.residuals import residuals as residuals
from .proof._residuals.table import Residual as Residual
from .proof._residuals.table import Residuals as Residuals

__version__ = "0.2.0.dev0"  # pyproject.toml reads it

# Names of release 0.1.0, for one release more.
if _typing.TYPE_CHECKING:  # to a type checker, `__getattr__` would define every name
    from .grouped import GroupedTensor as GroupedTensor
    from .grouped import grouped_matmul as grouped_matmul

    xla_flags = write_xla_flags
else:
    from ._errors import deprecated as _deprecated

    def __getattr__(name):
        if name in ("GroupedTensor", "grouped_matmul"):
            _deprecated(f"jaxoffload.{name}", f"from jaxoffload.grouped import {name}")
            return getattr(grouped, name)
        if name == "xla_flags":
            _deprecated("jaxoffload.xla_flags", "jaxoffload.write_xla_flags(profile)")
            return write_xla_flags
        raise AttributeError(f"module 'jaxoffload' has no attribute {name!r}")
