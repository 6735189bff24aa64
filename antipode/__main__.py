"""python -m antipode"""

import sys

from antipode.cli import main

sys.exit(main())
