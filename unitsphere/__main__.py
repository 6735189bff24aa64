"""python -m unitsphere"""

import sys

from unitsphere.cli import main

sys.exit(main())
