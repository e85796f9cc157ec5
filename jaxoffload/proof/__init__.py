"""What is claimed of a program, checked: each claim holds, fails, or is not checked, with the reason."""

from ._page import page as page
from ._profile import Move as Move
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._subject import exact_options as exact_options
from ._verify import Check as Check
from ._verify import Verification as Verification
from ._verify import checks as checks
from ._verify import verify as verify
