"""Start the command line, which is in `proof/_command.py`."""

import os
import sys

from .proof._command import main

if __name__ == "__main__":
    if sys.argv[1:2] in (["report"], ["plan"]):  # it allocates nothing, and other programs may need the GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.exit(main())
