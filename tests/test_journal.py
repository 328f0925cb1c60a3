"""The journal: an ordinary Arrow stream, read without copies, with no half block in it."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollout_workers.journal import Block, Journal

SCHEMA = pa.schema(
    [pa.field("n", pa.int64(), nullable=False), pa.field("ids", pa.large_list(pa.int32()))],
    metadata={"version": "1"},
)


def batch(start: int, rows: int = 3, width: int = 4) -> pa.RecordBatch:
    ids = [np.arange(width, dtype=np.int32) + start for _ in range(rows)]
    return pa.record_batch([pa.array(range(start, start + rows)), pa.array(ids)], schema=SCHEMA)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writes beyond ``size`` fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with Journal(tmp_path / "new" / "a.arrows", SCHEMA) as journal:
        batches = [batch(i * 10, rows=i) for i in range(1, 6)]
        blocks = [journal.append(b) for b in batches]
        assert [block.rows for block in blocks] == [1, 2, 3, 4, 5]
        for number in (4, 0, 2, 2, 1, 3):
            got = journal.read(blocks[number])
            assert got.equals(batches[number])
            assert got.schema.equals(SCHEMA, check_metadata=True)
        assert journal.num_bytes == journal.path.stat().st_size


def test_any_arrow_reader_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "a.arrows"
    with Journal(path, SCHEMA) as journal:
        for i in range(3):
            journal.append(batch(i))
    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
        assert reader.schema.equals(SCHEMA, check_metadata=True)
        assert reader.read_all().equals(pa.Table.from_batches([batch(i) for i in range(3)]))
    with pa.ipc.open_stream(path.read_bytes()) as reader:
        assert len(list(reader)) == 3


def test_readable_while_it_grows(tmp_path: Path) -> None:
    """A writer that was killed leaves a stream without its end mark."""
    with Journal(tmp_path / "a.arrows", SCHEMA, fsync=True) as journal:
        journal.append(batch(0))
        journal.append(batch(1))
        with pa.ipc.open_stream(journal.path.read_bytes()) as reader:
            assert reader.read_all().num_rows == 6


def test_reading_copies_nothing(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.arrows", SCHEMA) as journal:
        block = journal.append(batch(0, rows=4, width=1_000_000))
        before = pa.total_allocated_bytes()
        got = journal.read(block)
        assert got.nbytes > 16_000_000
        assert pa.total_allocated_bytes() - before < 100_000
        assert got["ids"][3].values[999_999].as_py() == 999_999


def test_a_block_outlives_the_journal(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.arrows", SCHEMA) as journal:
        got = journal.read(journal.append(batch(5)))
    journal.path.unlink()
    assert got.equals(batch(5))


def test_other_schemas_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.arrows", SCHEMA) as journal:
        size = journal.num_bytes
        for other in (SCHEMA.with_metadata({"version": "2"}), pa.schema([("n", pa.int64())])):
            columns = [batch(0)[name] for name in other.names]
            with pytest.raises(ValueError, match="differs"):
                journal.append(pa.record_batch(columns, schema=other))
        assert journal.num_bytes == size


def test_an_old_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.arrows"
    path.write_text("old")
    with pytest.raises(FileExistsError):
        Journal(path, SCHEMA)
    assert path.read_text() == "old"


def test_full_disk_leaves_no_half_block(tmp_path: Path) -> None:
    with Journal(tmp_path / "a.arrows", SCHEMA) as journal:
        first = journal.append(batch(1))
        size = journal.num_bytes
        with file_size_limit(size + 100), pytest.raises(OSError, match="too large"):
            journal.append(batch(2, width=10_000))
        assert journal.num_bytes == size == journal.path.stat().st_size
        second = journal.append(batch(3))  # there is room again
        assert journal.read(first).equals(batch(1))
        assert journal.read(second).equals(batch(3))
    with pa.ipc.open_stream(journal.path.read_bytes()) as reader:
        assert reader.read_all().num_rows == 6


def test_full_disk_from_the_start(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with file_size_limit(10), pytest.raises(OSError, match="too large"):
        Journal(tmp_path / "a.arrows", SCHEMA)
    assert len(os.listdir("/proc/self/fd")) == before
    with Journal(tmp_path / "a.arrows", SCHEMA):  # nothing of the failed one is in the way
        pass


def test_closes_on_a_full_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.arrows", SCHEMA)
    journal.append(batch(0))
    before = len(os.listdir("/proc/self/fd"))
    with file_size_limit(journal.num_bytes), pytest.raises(OSError, match="too large"):
        journal.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    journal.close()
    with pa.ipc.open_stream(journal.path.read_bytes()) as reader:
        assert reader.read_all().num_rows == 3


def test_close_twice(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.arrows", SCHEMA)
    block = journal.append(batch(0))
    journal.close()
    journal.close()
    assert journal.read(block).equals(batch(0))
    assert isinstance(block, Block)
