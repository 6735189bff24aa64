"""python -m unitsphere"""

import os
import sys

# `python -m` puts the working folder first on the path, so that any timm.py in a downloaded folder would be imported.
# Only code that the user names is taken from there (common/outside.py).
if sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from unitsphere.cli import main

sys.exit(main())
