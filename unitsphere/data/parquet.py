"""Hugging Face's form of a data set: Parquet files with a column of encoded images, and perhaps one of labels.

A Parquet file can only be read a row group at a time, some hundred images. The last ones read are kept, up to a limit,
so that images in order are cheap, and images in random order cost a row group each unless all fit.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from unitsphere.common.errors import UsageError
from unitsphere.common.extras import require
from unitsphere.data.files import open_regular
from unitsphere.data.images import Images, Splits
from unitsphere.data.labels import class_labels
from unitsphere.data.names import Names
from unitsphere.data.shards import find_shards, split_shards
from unitsphere.images.decode import BrokenImage

SUFFIX = ".parquet"
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")
KEPT = 128 * 2**20  # bytes of row groups that a process keeps
READERS = 4  # open files that a thread keeps
_opened = threading.local()


def parquet_splits(path: str, name: str) -> Splits:
    files = find_shards(Path(path), SUFFIX)
    if not files:
        raise UsageError(f"{name}: no *{SUFFIX} files in {path}.")
    root = Path(path) if Path(path).is_dir() else Path(path).parent
    splits = split_shards(files, root)
    return {split: partial(_open, root, name, splits, split) for split in splits}


def _open(root: Path, name: str, splits: dict[str, list[Path]], split: str) -> Images:
    tables, reasons = _tables(splits[split])
    image, label = _columns(tables[0])
    for table in tables:
        for column in (image, label):
            if column is not None and column not in table.schema.names:
                raise UsageError(f"{table.path} has no column {column!r}, which {tables[0].path} has.")
    rows = RowGroups(tables, image)
    shown = [os.path.relpath(table.path, os.path.abspath(root)) for table in tables]
    broken = list(reasons)

    def name_of(index: int) -> str:
        if index >= len(rows):
            return os.path.relpath(broken[index - len(rows)], root)
        number, row = rows.locate(index)
        return f"{shown[number]}/{row}"

    def read(index: int) -> bytes:
        if index >= len(rows):
            raise BrokenImage(reasons[broken[index - len(rows)]])
        return rows.read(index)

    others = [file for other in splits if other != split for file in splits[other]]
    labels, classes = (None, None) if label is None else _labels(tables, label, others)
    if labels is not None:
        labels = np.append(labels, np.full(len(broken), -1))
    return Images(name, Names(len(rows) + len(broken), name_of), labels, classes, read)


def _tables(files: list[Path]) -> tuple[list[_Table], dict[Path, str]]:
    """The files' footers, and why others have none: each of these counts as one broken image. Raises UsageError where
    no file has one."""
    tables, reasons = [], {}
    for file in files:
        try:
            tables.append(_Table(file))
        except UsageError as problem:
            reasons[file] = str(problem)
    if not tables:
        raise UsageError(reasons[files[0]])
    return tables, reasons


class _Table:
    """An open Parquet file's footer."""

    def __init__(self, path: Path) -> None:
        arrow, parquet = _pyarrow()
        self.path = os.path.abspath(path)
        try:
            open_regular(path).close()
            self.metadata = parquet.read_metadata(path)
            self.schema = self.metadata.schema.to_arrow_schema()
        except (arrow.ArrowException, OSError, ValueError) as problem:
            raise UsageError(f"{path} is no Parquet file, or a cut-off one: {problem}.") from problem

    def read(self, group: int, columns: list[str]) -> Any:
        return self._reader().read_row_group(group, columns=columns, use_threads=False)

    def _reader(self) -> Any:
        """The open file, of this thread in this process alone: it has state that others could disturb. Each thread
        keeps the last few, since opening one takes longer than reading a row."""
        _, parquet = _pyarrow()
        if getattr(_opened, "process", None) != os.getpid():
            _opened.process, _opened.files = os.getpid(), OrderedDict()
        kept: OrderedDict[_Table, Any] = _opened.files
        file = kept.pop(self, None) or parquet.ParquetFile(self.path, metadata=self.metadata, memory_map=True)
        kept[self] = file
        if len(kept) > READERS:
            kept.popitem(last=False)[1].close()
        return file


class RowGroups:
    """The images of several tables, by one index over all rows."""

    def __init__(self, tables: list[_Table], column: str) -> None:
        self.tables = tables
        arrow, _ = _pyarrow()
        # Of a struct only the bytes are read, not the path beside them.
        self.is_struct = arrow.types.is_struct(tables[0].schema.field(column).type)
        self.column = f"{column}.bytes" if self.is_struct else column
        self.groups = [(t, g) for t, table in enumerate(tables) for g in range(table.metadata.num_row_groups)]
        counts = [tables[t].metadata.row_group(g).num_rows for t, g in self.groups]
        self.ends = np.cumsum(counts, dtype=np.int64)
        self.firsts = np.cumsum([0, *(table.metadata.num_rows for table in tables)], dtype=np.int64)
        self.kept: dict[int, Any] = {}

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """Which table, and which of its rows."""
        table = int(np.searchsorted(self.firsts, index, "right")) - 1
        return table, index - int(self.firsts[table])

    def read(self, index: int) -> bytes:
        arrow, _ = _pyarrow()
        group = int(np.searchsorted(self.ends, index, "right"))
        start = int(self.ends[group - 1]) if group else 0
        try:
            data = self._group(group)[index - start].as_py()
        except (arrow.ArrowException, OSError, IndexError) as problem:
            raise BrokenImage(f"row group {group} of the tables cannot be read: {problem}") from problem
        if data is None:
            raise BrokenImage("the table holds a path and no image")
        return data

    def _group(self, group: int) -> Any:
        """The column of a row group. `kept` is replaced and never changed, so that threads need no lock, which a fork
        could leave locked: two may read groups at once, and then one of the two is kept."""
        if group in (before := self.kept):
            return before[group]
        table, number = self.groups[group]
        (column,) = self.tables[table].read(number, [self.column]).columns
        if self.is_struct:
            (column,) = column.flatten()
        kept, size = {group: column}, column.nbytes
        for older in before:  # the latest first
            size += before[older].nbytes
            if size > KEPT:
                break
            kept[older] = before[older]
        self.kept = kept
        return column


def _columns(table: _Table) -> tuple[str, str | None]:
    """The names of the image column and of the label column, if there is one."""
    arrow, _ = _pyarrow()
    schema, features = table.schema, _features(table)
    pictures = [name for name, feature in features.items() if feature.get("_type") == "Image"]
    image = next((name for name in (*pictures, *IMAGE_COLUMNS) if name in schema.names), None)
    if image is None:
        raise UsageError(
            f"{table.path} has no column 'image'; it has {', '.join(map(repr, schema.names))}. Images are a column of "
            "bytes, or of {bytes, path}, called image."
        )
    kind = schema.field(image).type
    holds = kind.field("bytes").type if arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else kind
    if not (arrow.types.is_binary(holds) or arrow.types.is_large_binary(holds)):
        raise UsageError(f"{table.path}: the column {image!r} is {kind}; it must be bytes, or {{bytes, path}}.")
    numbered = [name for name, feature in features.items() if feature.get("_type") == "ClassLabel"]
    return image, next((name for name in (*LABEL_COLUMNS, *numbered) if name in schema.names), None)


def _labels(tables: list[_Table], column: str, others: list[Path]) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """others: the files of the other splits, whose classes count too where they have no numbers of their own."""
    arrow, _ = _pyarrow()
    kind = tables[0].schema.field(column).type
    parts = _column(tables, column)
    if _is_text(kind):
        words = np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])
        elsewhere = [table for table in map(_Table, others) if column in table.schema.names]
        named = [*parts, *(part for part in _column(elsewhere, column) if _is_text(part.type))]
        known = {word for part in named for word in part.unique().to_pylist()}
        classes = tuple(sorted(known - {None}))
        label_of: dict[str | None, int] = {word: label for label, word in enumerate(classes)}
        return np.array([label_of.get(word, -1) for word in words], np.int64), classes
    if not arrow.types.is_integer(kind):
        raise UsageError(f"{tables[0].path}: the column {column!r} is {kind}; labels are whole numbers or text.")
    names = _features(tables[0]).get(column, {}).get("names")

    def every_split() -> list[np.ndarray]:
        elsewhere = [table for table in map(_Table, others) if column in table.schema.names]
        return [_numbers(tables, column), _numbers(elsewhere, column)]

    return class_labels(_numbers(tables, column), every_split, names if isinstance(names, list) else ())


def _numbers(tables: list[_Table], column: str) -> np.ndarray:
    """(N,) int64, -1 where the table has none."""
    arrow, _ = _pyarrow()
    tables = [table for table in tables if arrow.types.is_integer(table.schema.field(column).type)]
    try:
        parts = [part.cast("int64").fill_null(-1).to_numpy() for part in _column(tables, column)]
    except arrow.ArrowInvalid as problem:
        raise UsageError(f"{tables[0].path}: the column {column!r} holds numbers above 2^63 - 1: {problem}.") from None
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _column(tables: list[_Table], name: str) -> list[Any]:
    arrow, _ = _pyarrow()
    parts = []
    for table in tables:
        try:
            parts += [table.read(group, [name]).column(0) for group in range(table.metadata.num_row_groups)]
        except (arrow.ArrowException, OSError) as problem:
            raise UsageError(f"{table.path}: the column {name!r} cannot be read: {problem}.") from problem
    return parts


def _is_text(kind: Any) -> bool:
    arrow, _ = _pyarrow()
    return bool(arrow.types.is_string(kind) or arrow.types.is_large_string(kind))


def _features(table: _Table) -> dict[str, dict[str, Any]]:
    """What Hugging Face's library wrote about the columns, if it did."""
    text = (table.schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(text)["info"]["features"] if text else {}
        features = features if isinstance(features, dict) else {}
    except (ValueError, KeyError, TypeError, RecursionError):  # the columns are looked for by their usual names
        features = {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _pyarrow() -> tuple[Any, Any]:
    require("pyarrow", "reading Parquet files")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet
