"""Times the contrastive loss, forward and backward, in its plain and fused forms on one CUDA device, and writes JSON.

    python benchmarks/loss.py --json loss.json
    python benchmarks/loss.py --tune --json tiles.json       # the fused forms with other tiles and products

Milliseconds are medians of warmed-up calls between CUDA events: called one by one ("ms"), and recorded as a CUDA graph
and replayed ("recorded"), as a training step does. Memory is what a call takes beyond its inputs. Errors are norm-wise,
of the loss and of the query's gradient against the closed form in float64 on the same inputs; where the form takes
bfloat16, the inputs are bfloat16 numbers. (A bfloat16 query gets a bfloat16 gradient: its error is mostly that.)
`TRITON_INTERPRET=1 python benchmarks/loss.py --device cpu --json FILE` shows that it runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unitsphere.objectives import fused, info_nce
from unitsphere.objectives.fused import Tiles

TAU = 0.07
DIM = 128
CENTRES = 1000
SHAPES = [
    (4096, 262144),
    (256, 65536),
    (4096, 65536),
    (512, 65536),
    (256, 16384),
    (512, 4096),
    (256, 4096),
    (256, 1024),
]
BF16, F32 = torch.bfloat16, torch.float32
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_in_bfloat16(query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
    """As one writes it under autocast: products in bfloat16, cross-entropy in float32."""
    with torch.autocast(query.device.type, BF16):
        positive = torch.einsum("nd,nd->n", query, keys)[:, None]
        logits = torch.cat([positive, query @ negatives.T], dim=1) / TAU
        return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.long, device=query.device))


class Form(NamedTuple):
    loss: Loss
    query: torch.dtype
    negatives: torch.dtype


PLAIN, FUSED = (partial(info_nce, temperature=TAU, fused=form) for form in (False, True))
FORMS = {
    "plain float32": Form(PLAIN, F32, F32),
    "plain bf16": Form(plain_in_bfloat16, F32, BF16),
    "fused bf16": Form(FUSED, BF16, BF16),
    "fused bf16, float32 query": Form(FUSED, F32, BF16),
    "fused float32": Form(FUSED, F32, F32),
}
TUNED_SHAPES = SHAPES[:2]
BF16_TILES = [
    Tiles(*sizes) for sizes in [(128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2), (64, 64, 4, 3)]
]
F32_TILES = [Tiles(*sizes) for sizes in [(128, 32, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2), (128, 64, 8, 2)]]


def inputs(n: int, k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and negatives: unit vectors around common centres, as a trained encoder gives them."""
    random = torch.Generator(device=device).manual_seed(0)
    centres = torch.randn(CENTRES, DIM, device=device, generator=random)

    def around(which: Tensor) -> Tensor:
        noise = torch.randn(len(which), DIM, device=device, generator=random)
        return F.normalize(centres[which] + 0.7 * noise, dim=1)

    mine, others = (torch.randint(CENTRES, (size,), device=device, generator=random) for size in (n, k))
    return around(mine), around(mine), around(others)


def closed_form(query: Tensor, keys: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient in float64: dL/dq = (1 - p_k) (sum_j softmax_j n_j - k) / tau, some queries at a time."""
    losses, gradients = [], []
    negatives = negatives.double()
    for q, k in zip(query.double().split(256), keys.double().split(256), strict=True):
        scores, positive = q @ negatives.T / TAU, (q * k).sum(dim=1) / TAU
        lse = scores.logsumexp(dim=1)
        mean = (scores - lse[:, None]).exp_() @ negatives
        losses.append(torch.logaddexp(positive, lse) - positive)
        gradients.append(torch.sigmoid(lse - positive)[:, None] * (mean - k) / TAU)
    return torch.cat(losses).mean(), torch.cat(gradients) / len(query)


def median_ms(work: Callable[[], Any], device: torch.device, calls: int = 15) -> float:
    times = []
    for call in range(3 + calls):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            spent = start.elapsed_time(end)
        else:
            started = time.perf_counter()
            work()
            spent = 1e3 * (time.perf_counter() - started)
        if call >= 3:
            times.append(spent)
    return statistics.median(times)


def recorded(work: Callable[[], Any]) -> Callable[[], None]:
    """The (warmed-up) work as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure(form: Form, n: int, k: int, device: torch.device) -> dict[str, Any]:
    given = inputs(n, k, device)
    if BF16 in (form.query, form.negatives):
        given = tuple(tensor.to(BF16) for tensor in given)  # type: ignore[assignment]
    true_loss, true_gradient = closed_form(*given)
    query, keys, negatives = given[0].to(form.query), given[1].to(form.query), given[2].to(form.negatives)
    query.requires_grad_()
    del given

    def work() -> tuple[Tensor, Tensor]:
        loss = form.loss(query, keys, negatives)
        return loss.detach(), torch.autograd.grad(loss, query)[0]

    loss, gradient = work()
    row: dict[str, Any] = {
        "loss_error": (abs(loss.double() - true_loss) / true_loss).item(),
        "gradient_error": ((gradient.double() - true_gradient).norm() / true_gradient.norm()).item(),
    }
    row["ms"] = median_ms(work, device)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        row["extra_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        row["recorded_ms"] = median_ms(recorded(work), device)
        torch.cuda.empty_cache()
    return row


def compare(device: torch.device, shapes: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for n, k in shapes:
        for name, form in FORMS.items():
            yield {"n": n, "k": k, "form": name} | measure(form, n, k, device)


def tune(device: torch.device, shapes: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Every fused form with other tiles, and with other ways to multiply float32."""
    for name, form in FORMS.items():
        if form.loss is not FUSED:
            continue
        for precision in ("tf32x3", "bf16x3", "bf16x6") if form.negatives == F32 else ("tf32x3",):
            for tiles in F32_TILES if form.negatives == F32 else BF16_TILES:
                fused.PRECISION, fused.TILES[form.negatives, DIM] = precision, tiles
                for n, k in shapes:
                    label = f"{name}, {precision}" if form.negatives == F32 else name
                    row = {"n": n, "k": k, "form": label, "tiles": list(tiles)}
                    try:
                        yield row | measure(form, n, k, device)
                    except Exception as error:  # too large for this card: a result too
                        yield row | {"error": f"{type(error).__name__}: {error}"}


def in_words(row: dict[str, Any]) -> str:
    words = f"{row['n']:>5} x {row['k']:<7} {row['form']:<28} {row.get('tiles', '')!s:<18}"
    if "error" in row:
        return words + row["error"][:80]
    words += f" {row['ms']:>8.3f} ms"
    if "extra_mib" in row:
        words += f" {row['recorded_ms']:>8.3f} recorded {row['extra_mib']:>9.1f} MiB"
    return words + f"   off by {row['loss_error']:.1e} and {row['gradient_error']:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="the fused forms with other tiles, on two shapes")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    tiny = device.type != "cuda"
    if not tiny and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    about = {
        "date": date.today().isoformat(),
        "gpu": None if tiny else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": " ".join(["python", *sys.argv]),
        "temperature": TAU,
        "dim": DIM,
    }
    rows = []
    torch.set_num_threads(1)
    work, shapes = (tune, TUNED_SHAPES) if options.tune else (compare, SHAPES)
    for row in work(device, [(8, 700)] if tiny else shapes):
        print(in_words(row), flush=True)
        rows.append(row)
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
