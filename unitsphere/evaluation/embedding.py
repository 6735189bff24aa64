"""Features of a user's own images: saved with their names, as neighbours on a sheet, as near-duplicates."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from unitsphere.common.errors import UnitsphereError, UsageError
from unitsphere.common.extras import require
from unitsphere.common.files import refuse_unwritable, replacing
from unitsphere.common.randomness import generator
from unitsphere.common.text import printable
from unitsphere.data.loader import Loader
from unitsphere.features.inputs import usable_rows
from unitsphere.features.knn import neighbours
from unitsphere.images.canvas import Canvas
from unitsphere.images.contact_sheet import contact_sheet

SUFFIXES = (".npz", ".parquet")


def check_path(path: str | os.PathLike[str]) -> None:
    """Raises UsageError if features cannot be saved under this name: to be asked before they are computed."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise UsageError(f"out: {path} ends with {suffix!r}; features are saved as {' or '.join(SUFFIXES)}.")
    if suffix == ".parquet":
        require("pyarrow", "out: parquet")
    refuse_unwritable("out", Path(path), Path(path).parent)


def check_picture(path: str | os.PathLike[str]) -> None:
    """The same for a picture."""
    known = Image.registered_extensions()
    if known.get(Path(path).suffix.lower()) not in Image.SAVE:
        raise UsageError(f"neighbours: {path} is no name of a picture; .png and .jpg are.")
    refuse_unwritable("neighbours", Path(path), Path(path).parent)


def save_features(
    path: str | os.PathLike[str],
    features: Tensor,
    names: Sequence[str],
    labels: Tensor | np.ndarray | None = None,
    classes: Sequence[str] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> None:
    """Write features (N, F) with the images' names, and their labels (N,) or (N, classes) where they have some.

    .npz: arrays `names`, `features`, `labels`, `classes`, and `meta` as JSON text; no pickle.
    .parquet: columns `name`, `features` (lists of fixed length), `label`, `class`; meta in the schema.
    The file appears whole or not at all.
    """
    check_path(path)
    arrays = {"features": features.float().cpu().numpy()}
    if labels is not None:
        arrays["labels"] = np.asarray(labels, np.int64)
    if classes is not None:
        arrays["classes"] = np.array(classes, np.str_)
    write = _write_npz if Path(path).suffix == ".npz" else _write_parquet
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
            write(file, names, arrays, json.dumps(meta or {}))
    except OSError as problem:
        raise UnitsphereError(f"{path} could not be written: {problem}") from problem


def _write_npz(file: IO[bytes], names: Sequence[str], arrays: dict[str, np.ndarray], meta: str) -> None:
    # Every name takes the room of the longest: what numpy can read again without a pickle has one width.
    everything: dict[str, Any] = {"names": np.array(names, np.str_), **arrays, "meta": np.array(meta)}
    np.savez(file, **everything)


def _write_parquet(file: IO[bytes], names: Sequence[str], arrays: dict[str, np.ndarray], meta: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = arrays["features"]
    rows = pa.FixedSizeListArray.from_arrays(pa.array(features.reshape(-1)), features.shape[1])
    columns = {"name": pa.array([name.encode(errors="backslashreplace").decode() for name in names]), "features": rows}
    if "labels" in arrays:
        several = arrays["labels"].ndim == 2  # then a list for each image: 1 where a class applies
        columns["label"] = pa.array(list(arrays["labels"])) if several else pa.array(arrays["labels"])
        if "classes" in arrays and not several:
            columns["class"] = pa.array(arrays["classes"]).take(pa.array(arrays["labels"], mask=arrays["labels"] < 0))
    pq.write_table(pa.table(columns).replace_schema_metadata({"unitsphere": meta}), file)


def neighbour_sheet(
    loader: Loader, features: Tensor, names: Sequence[str], *, count: int = 12, k: int = 8, seed: int = 0
) -> Image.Image:
    """A picture: in each row one of `count` images drawn by the seed, then its k nearest, the nearest first.

    features: (N, F), row n that of the loader's image n; broken images (NaN) do not appear.
    """
    rows = usable_rows(features)
    if len(rows) < 2:
        raise UsageError("neighbours: one image has none; at least 2 are needed.")
    known = features[rows]
    queries = torch.randperm(len(rows), generator=generator(seed, "neighbour-sheet"))[:count]
    scores, nearest = neighbours(known, known[queries], min(k, len(rows) - 1), exclude=queries)
    sheet = rows[torch.cat([queries[:, None], nearest], 1)]  # (count, 1 + k)
    pictures = [[_shown(canvas, n) for n in range(len(canvas))] for _, canvas in loader.batches(sheet.unbind())]
    captions = [
        f"{printable(names[int(shown[0])])}\ncosine {score[0]:.2f} to {score[-1]:.2f}"
        for shown, score in zip(sheet, scores, strict=True)
    ]
    return contact_sheet(pictures, captions)


def _shown(canvas: Canvas, n: int) -> np.ndarray:
    """Image n in 8 bits, with as many channels as a screen can show."""
    image = canvas.image(n)
    channels = image.shape[2]
    some = image[:, :, : channels if channels in (1, 3, 4) else 1 if channels == 2 else 3]
    return (some.astype(np.float32) * (255 / canvas.full_scale)).round().astype(np.uint8)


def near_duplicates(
    features: Tensor, threshold: float = 0.98, *, limit: int = 100_000, chunk: int = 4096
) -> list[tuple[int, int, float]]:
    """Pairs (i, j, cosine), i < j, with a cosine of at least `threshold`, the nearest first.

    features: (N, F); rows of NaN are nobody's duplicate. At most `limit` pairs, the nearest, are kept, so
    that a collapsed backbone, to which all images are duplicates, does not fill the memory.
    """
    scores, pairs = torch.empty(0), torch.empty(0, 2, dtype=torch.int64)
    x = normalize(features.float(), dim=1)
    for start in range(0, len(x), chunk):
        for other in range(start, len(x), chunk):
            block = x[start : start + chunk] @ x[other : other + chunk].T
            near = block >= threshold
            where = (near.triu(1) if other == start else near).nonzero()
            scores = torch.cat([scores, block[where[:, 0], where[:, 1]].cpu()])
            pairs = torch.cat([pairs, where.cpu() + torch.tensor([start, other])])
            scores, order = scores.sort(descending=True, stable=True)
            scores, pairs = scores[:limit], pairs[order[:limit]]
    return [(i, j, score) for (i, j), score in zip(pairs.tolist(), scores.tolist(), strict=True)]
