"""The Arrow row, schema version 1: one row per trajectory segment.

``record_batch`` is the only constructor of rows; it checks every invariant before a row exists, so
nothing downstream needs to. New columns go last and are nullable.

Worked example: prompt of 3 tokens, 2 generated, a user turn of 2, then 1 generated::

    token_ids  = [p p p g g c c g]     prompt_length = 3
    loss_mask  = [0 0 0 1 1 0 0 1]     versions = [(3, 5, v0), (7, 8, v1)]
    turns      = [(3, 5), (7, 8)]      min_version = v0, max_version = v1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_workers.errors import BadEngineReply

SCHEMA_VERSION = "1"
LOGPROB_TOLERANCE = 1e-4  # float32 rounding may lift log(1) above zero by this much

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]

_SPAN = pa.struct([("start", pa.int64()), ("end", pa.int64()), ("version", pa.int64())])
_TURN = pa.struct(
    [
        ("response_id", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("finish_reason", pa.string()),
        ("worker", pa.string()),
        ("attempt", pa.int32()),
        ("seconds", pa.float32()),
        ("cached_tokens", pa.int32()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("min_p", pa.float32()),
        ("top_k", pa.int32()),
        ("penalties", pa.bool_()),
        ("constrained", pa.bool_()),
        ("truncated_sampling", pa.bool_()),
        ("logprob_kind", pa.string()),
        ("clamped", pa.bool_()),
        ("resumed", pa.bool_()),
        ("cache_mixed", pa.bool_()),
        ("call_errors", pa.int32()),
    ]
)


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_COLUMNS = [
    _required("trajectory_id", pa.string()),
    _required("session_id", pa.string()),
    pa.field("group_id", pa.string()),
    _required("segment", pa.int32()),
    _required("num_segments", pa.int32()),
    pa.field("group_size", pa.int32()),
    _required("prompt_length", pa.int64()),
    _required("token_ids", pa.large_list(pa.int32())),
    _required("loss_mask", pa.large_list(pa.uint8())),
    _required("logprobs", pa.large_list(pa.float32())),
    _required("versions", pa.list_(_SPAN)),
    _required("min_version", pa.int64()),
    _required("max_version", pa.int64()),
    _required("turns", pa.list_(_TURN)),
    pa.field("reward", pa.float64()),
    pa.field("turn_rewards", pa.list_(pa.float64())),
    _required("tokens_excluded", pa.int64()),
    _required("tokens_masked_elsewhere", pa.int64()),
    pa.field("routed_experts", pa.large_binary()),
    _required("status", pa.string()),
    _required("segment_reason", pa.string()),
    pa.field("error", pa.string()),
    _required("retention", pa.string()),
    _required("run_id", pa.string()),
    _required("created_at", pa.timestamp("us", tz="UTC")),
    _required("items", pa.large_string()),
    _required("metadata", pa.large_string()),
]


def row_schema(model: str, template_digest: str) -> pa.Schema:
    """Schema of all rows of one pool; ``model`` and the template's digest ride as metadata."""
    metadata = {"version": SCHEMA_VERSION, "model": model, "template_digest": template_digest}
    return pa.schema(_COLUMNS, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Positions ``[start, end)`` sampled by weight version ``version``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One generation inside a row: positions ``[start, end)`` and how it was sampled."""

    response_id: str
    start: int
    end: int
    finish_reason: str  # stop, length
    worker: str
    attempt: int = 0
    seconds: float = 0.0
    cached_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    penalties: bool = False
    constrained: bool = False
    truncated_sampling: bool = False
    logprob_kind: str = "temperature_scaled"  # log_softmax((logits + bias, penalties) / T)
    clamped: bool = False
    resumed: bool = False
    cache_mixed: bool = False
    call_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One segment of one trajectory, before it becomes Arrow. Arrays are ``[num_tokens]``."""

    trajectory_id: str
    session_id: str
    group_id: str | None = None
    segment: int = 0
    num_segments: int = 1
    group_size: int | None = None
    prompt_length: int
    token_ids: Ids
    loss_mask: Mask
    logprobs: Logprobs
    versions: Sequence[Span]
    min_version: int
    max_version: int
    turns: Sequence[TurnRecord]
    reward: float | None = None
    turn_rewards: Sequence[float] | None = None
    tokens_excluded: int = 0
    tokens_masked_elsewhere: int = 0
    routed_experts: bytes | None = None
    status: str
    segment_reason: str
    error: str | None = None
    retention: str = "keep"
    run_id: str
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    items: str = "[]"
    metadata: str = "{}"


def record_batch(rows: Sequence[Row], schema: pa.Schema) -> pa.RecordBatch:
    """Build checked rows into one batch of ``schema``.

    Raises:
        BadEngineReply: a row breaks an invariant; the message names the row and both sides.
    """
    for row in rows:
        check(row)
    return pa.RecordBatch.from_arrays([_column(rows, f) for f in schema], schema=schema)


def to_ipc(batch: pa.RecordBatch) -> pa.Buffer:
    """The batch and its schema as one Arrow IPC stream; pickling a batch costs 30 times as much."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def from_ipc(data: pa.Buffer) -> pa.RecordBatch:
    """The batch that ``to_ipc`` was given, as a view of ``data``."""
    return pa.ipc.open_stream(data).read_next_batch()


def row_id(trajectory_id: str, segment: int) -> str:
    """The id of a row, by which a consumer drops doubles."""
    return f"{trajectory_id}/{segment}"


def check(row: Row) -> None:
    """Raise ``BadEngineReply`` unless the row is consistent in itself."""
    total = len(row.token_ids)
    _require(row, total == len(row.loss_mask) == len(row.logprobs), "three lists differ in length")
    _require(row, bool(np.isfinite(row.logprobs).all()), "logprobs are not finite")
    trained = row.loss_mask != 0
    _require(row, bool((row.loss_mask[trained] == 1).all()), "loss_mask holds more than 0 and 1")
    _require(row, not row.logprobs[~trained].any(), "a masked position carries a logprob")
    above = row.logprobs > LOGPROB_TOLERANCE
    _require(row, not above.any(), "a logprob is above zero")
    _check_turns(row, trained, total)
    _check_versions(row)


def _check_turns(row: Row, trained: npt.NDArray[np.bool_], total: int) -> None:
    generated = np.zeros(total, dtype=bool)
    end = 0
    for turn in row.turns:
        _require(row, end <= turn.start <= turn.end <= total, "turns overlap or leave the row")
        generated[turn.start : turn.end] = True
        end = turn.end
    first = row.turns[0].start if row.turns else total
    _require(row, row.prompt_length == first, "prompt_length is not where generation starts")
    _require(row, not (trained & ~generated).any(), "loss_mask is 1 outside the generations")
    elsewhere = int((generated & ~trained).sum())
    _require(row, elsewhere == row.tokens_masked_elsewhere, "tokens_masked_elsewhere is off")


def _check_versions(row: Row) -> None:
    spans = list(row.versions)
    for turn in row.turns:
        position = turn.start
        while spans and spans[0].start == position and position < turn.end:
            position = spans.pop(0).end
        _require(row, position == turn.end, "version spans do not tile the generations")
    _require(row, not spans, "a version span lies outside the generations")
    if row.versions:
        seen = [span.version for span in row.versions]
        _require(row, row.min_version == min(seen), "min_version is off")
        _require(row, row.max_version == max(seen), "max_version is off")


def _require(row: Row, holds: bool, broken: str) -> None:
    if not holds:
        lengths = (
            f"{len(row.token_ids)} ids, {len(row.loss_mask)} mask, {len(row.logprobs)} logprobs"
        )
        where = row_id(row.trajectory_id, row.segment)
        raise BadEngineReply(f"row {where}: {broken} ({lengths}); the row is not stored")


_ARRAYS = {"token_ids": pa.int32(), "loss_mask": pa.uint8(), "logprobs": pa.float32()}
_TURN_FIELDS = [f.name for f in fields(TurnRecord)]


def _column(rows: Sequence[Row], column: pa.Field) -> pa.Array:
    values = [getattr(row, column.name) for row in rows]
    if column.name in _ARRAYS:
        return _ragged(values, column.type)
    if column.name == "turns":
        values = [[{n: getattr(t, n) for n in _TURN_FIELDS} for t in turns] for turns in values]
    elif column.name == "versions":
        values = [[(s.start, s.end, s.version) for s in spans] for spans in values]
    return pa.array(values, type=column.type)


def _ragged(arrays: Sequence[npt.NDArray[np.generic]], kind: pa.DataType) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    flat = pa.array(np.concatenate(arrays) if arrays else [], type=kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), flat, type=kind)
