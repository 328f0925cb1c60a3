"""Append-only Arrow IPC file: written before anyone is told, read back by memory map.

The file is one ordinary Arrow IPC stream, so any Arrow reader opens it. A block handed out again
is a view of the page cache, not a copy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"  # Arrow columnar format, IPC streaming


@dataclass(frozen=True, slots=True)
class Block:
    """Where one batch lies: byte ``offset`` in the file, and its number of rows."""

    offset: int
    rows: int


class Journal:
    """Owns one stream file of batches of one schema."""

    def __init__(self, path: Path, schema: pa.Schema, *, fsync: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.schema, self._fsync = path, schema, fsync
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  (closed by close)
        self._end = 0
        try:
            self._write(schema.serialize())
        except OSError:
            self._file.close()
            path.unlink()
            raise
        self._map: Any = None
        self._mapped = 0

    def append(self, batch: pa.RecordBatch) -> Block:
        """Write a batch whole; when this returns it is in the file (on disk with ``fsync``).

        Raises:
            OSError: the disk is full or gone; the block is not stored.
            ValueError: the batch has another schema.
        """
        if not batch.schema.equals(self.schema, check_metadata=True):
            raise ValueError(f"batch schema differs from the journal's:\n{batch.schema}")
        offset = self._end
        self._write(batch.serialize())
        return Block(offset, batch.num_rows)

    def read(self, block: Block) -> pa.RecordBatch:
        """The batch at ``block``, without a copy."""
        if self._mapped < self._end:
            self._map = pa.memory_map(str(self.path), "r")
            self._mapped = self._end
        self._map.seek(block.offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(self._map), self.schema)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._end

    def close(self) -> None:
        """Write the end-of-stream mark and close."""
        if not self._file.closed:
            try:
                self._write(_END_OF_STREAM)
            finally:
                self._file.close()

    def _write(self, data: Any) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file.fileno(), view) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self._end)  # no half block stays behind
            os.lseek(self._file.fileno(), self._end, os.SEEK_SET)
            raise
        self._end += len(memoryview(data))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
