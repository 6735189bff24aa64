"""python -m tests.fuzz N [--first SEED] [--kind KIND]: run N inputs, and say which of them go wrong."""

from __future__ import annotations

import argparse
import sys
import time

from .corpus import KINDS
from .server import run_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only these kinds")
    options = parser.parse_args()
    started, wrong, slowest, largest = time.monotonic(), [], 0.0, 0.0
    for number, verdict in enumerate(run_all(options.count, options.first, options.kind), start=1):
        slowest, largest = max(slowest, verdict.seconds), max(largest, verdict.mib)
        if verdict.problem:
            wrong.append(verdict)
            print(f"seed {verdict.seed} ({verdict.kind}): {verdict.problem}\n  unitsphere {' '.join(verdict.words)}")
            print("  " + verdict.told[-600:].replace("\n", "\n  "), flush=True)
        if number % 1000 == 0:
            print(f"{number} inputs, {len(wrong)} wrong, {time.monotonic() - started:.0f} s", flush=True)
    print(
        f"{options.count} inputs in {time.monotonic() - started:.0f} s: {len(wrong)} wrong; the slowest took "
        f"{slowest:.1f} s, the largest {largest:.0f} MiB"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
