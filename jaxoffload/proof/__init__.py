"""Evidence about a program: verify() checks its claims, predict() and plan() look ahead, profile() looks back."""

import typing as _typing

from ._check import Check as Check
from ._check import Verification as Verification
from ._plan.plan import plan as plan
from ._plan.result import CannotPlan as CannotPlan
from ._plan.result import NothingFits as NothingFits
from ._plan.result import Plan as Plan
from ._predict.fit import Fit as Fit
from ._predict.machine import Machine as Machine
from ._predict.machine import machine as machine
from ._predict.predict import Memory as Memory
from ._predict.predict import Prediction as Prediction
from ._predict.predict import predict as predict
from ._predict.rates import AttentionRate as AttentionRate
from ._predict.rates import Bus as Bus
from ._predict.rates import Gemms as Gemms
from ._predict.rates import Link as Link
from ._profile import Move as Move
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._profile import read_profile as read_profile
from ._program.exact import exact_options as exact_options
from ._program.memory import memory_plan as memory_plan
from ._program.scheduling import scheduling_options as scheduling_options
from ._verify.verify import verify as verify

# Names of release 0.1.0, for one release more.
if not _typing.TYPE_CHECKING:
    from .._errors import deprecated as _deprecated

    def __getattr__(name):
        if name in ("fits", "Fits"):
            _deprecated(f"jaxoffload.proof.{name}", "jaxoffload.proof.predict(f, *args, machine=machine)")
            return predict if name == "fits" else Prediction
        raise AttributeError(f"module 'jaxoffload.proof' has no attribute {name!r}")
