"""Evidence about a program: verify() checks its claims, fits() and room() predict, profile() and page() report."""

from ._check import Check as Check
from ._check import Verification as Verification
from ._predict.fit import Fit as Fit
from ._predict.fit import Fits as Fits
from ._predict.fit import fits as fits
from ._predict.machine import Bus as Bus
from ._predict.machine import Machine as Machine
from ._predict.machine import known_machine as known_machine
from ._predict.machine import machine as machine
from ._predict.room import Room as Room
from ._predict.room import room as room
from ._predict.staying import staying as staying
from ._program.exact import exact_options as exact_options
from ._report.page import about as about
from ._report.page import page as page
from ._report.png import pictures as pictures
from ._report.profile import Move as Move
from ._report.profile import Profile as Profile
from ._report.profile import profile as profile
from ._report.profile import read_profile as read_profile
from ._verify.peaks import Peaks as Peaks
from ._verify.peaks import peaks_of as peaks_of
from ._verify.verify import checks as checks
from ._verify.verify import verify as verify
