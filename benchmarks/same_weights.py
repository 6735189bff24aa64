"""Trains every method for a few steps on a CPU and prints a hash of each checkpoint.

    python benchmarks/same_weights.py [FILE.json]

Run it on the commit before a change of the code's shape and on the commit after it: equal hashes mean that every
weight, queue, slow copy and slot of the optimiser is equal to the last bit. With FILE the hashes are compared with
those that it holds, or are written there if it does not exist. One thread, since several may add in another order.
"""

import hashlib
import importlib
import json
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors import safe_open

NAME = "unitsphere" if find_spec("unitsphere") else "antipode"  # what it was called until a394c43
unitsphere = importlib.import_module(NAME)

SMALL = {
    "data": "shapes=160x16",
    "backbone": "resnet-tiny",
    "image_size": 16,
    "batch_size": 16,
    "epochs": 2,
    "device": "cpu",
    "tensorboard": False,
    "warmup_epochs": 0,
}
QUEUE = {"queue_size": 64, "bn_groups": 2}
MIX = {"hardest": 16, "pairs": 8, "with_query": 4, "mixing_warmup": 1}
# Defaults of these three changed in November 2026; both commits are given the same settings.
SIMCLR = {"zero_init_residual": False, "head": "mlp-bn"}
BYOL = {"hidden": 32, "dim": 16, "zero_init_residual": False}
CASES = {
    "moco-v1": QUEUE,
    "moco-v2": QUEUE,
    "moco-v2 symmetric": {**QUEUE, "symmetric": True},
    "moco-v2 oracle": {**QUEUE, "oracle": True},
    "moco-v2 accumulate": {"queue_size": 64, "bn_groups": 4, "accumulate": 2},
    "moco-v2 bn_groups 1": {"queue_size": 64, "bn_groups": 1},
    "moco-v2 cosine momentum": {**QUEUE, "momentum_schedule": "cosine"},
    "moco-v2 forces": {**QUEUE, "singular_weight": 0.004, "brownian_weight": 0.5, "uniformity_weight": 0.1},
    "simclr": SIMCLR,
    "simclr both kinds": {**SIMCLR, "both_views": False, "alpha": 64},
    "eqco": {"negatives": 16, "alpha": 256, "bn_groups": 2},
    "simo": {},
    "jcl": QUEUE,
    "jcl chunks": {**QUEUE, "key_chunks": 2, "normalise_mean": True},
    "jcl-vanilla": {**QUEUE, "keys": 5},
    "jcl repeated": {**QUEUE, "positives": "repeated"},
    "mochi": {**QUEUE, **MIX},
    "mochi variants": {
        **QUEUE,
        **MIX,
        "mix_rank_by": "key",
        "mix_in": "key",
        "mix_weigh": True,
        "mix_temperature": 0.1,
    },
    "jcl+mochi+eqco": {**MIX, "negatives": 48, "alpha": 256, "bn_groups": 2},
    "byol": BYOL,
    "byol layer": {**BYOL, "norm": "layer"},
    "msbreg": BYOL,
    "msbreg split joint": {**BYOL, "centroid": "split", "joint_statistics": True},
    "supervised": {},
}


def hash_of(run: Any) -> str:
    """Of all tensors of the last checkpoint that training changes, in the order of their names."""
    _, path = run.checkpoints()[-1]
    found = hashlib.blake2b(digest_size=12)
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            if name.startswith(("method.", "optimizer.")):
                found.update(name.encode() + file.get_tensor(name).numpy().tobytes())
    return found.hexdigest()


def main() -> int:
    torch.set_num_threads(1)
    hashes = {}
    for case, changes in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            run = unitsphere.pretrain(case.split()[0], out=Path(folder) / "run", **{**SMALL, **changes})
            hashes[case] = hash_of(run)
        print(f"{case:<28} {hashes[case]}", flush=True)
    if len(sys.argv) < 2:
        return 0
    known = Path(sys.argv[1])
    if not known.exists():
        known.write_text(json.dumps(hashes, indent=1) + "\n")
        return 0
    before = json.loads(known.read_text())
    differ = [case for case in before if before[case] != hashes.get(case)]
    print(
        f"{len(before) - len(differ)} of {len(before)} are equal" + "".join(f"\n  differs: {case}" for case in differ)
    )
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
