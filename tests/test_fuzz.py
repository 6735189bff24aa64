"""Two hundred damaged inputs, each always the same. `python -m tests.fuzz 10000` runs more."""

import os
import subprocess
import sys
from pathlib import Path


def test_damaged_inputs_end_in_a_sentence_and_a_status():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "200"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
