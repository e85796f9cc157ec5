"""What is claimed of a program, checked: each claim holds, fails, or is not checked, with the reason."""

from ._fit import Fit as Fit
from ._fit import Fits as Fits
from ._fit import fits as fits
from ._machine import Machine as Machine
from ._machine import known_machine as known_machine
from ._machine import machine as machine
from ._page import about as about
from ._page import page as page
from ._peaks import Peaks as Peaks
from ._peaks import peaks_of as peaks_of
from ._png import pictures as pictures
from ._profile import Move as Move
from ._profile import Profile as Profile
from ._profile import profile as profile
from ._profile import read_profile as read_profile
from ._room import Room as Room
from ._room import room as room
from ._subject import exact_options as exact_options
from ._verify import Check as Check
from ._verify import Verification as Verification
from ._verify import checks as checks
from ._verify import verify as verify
