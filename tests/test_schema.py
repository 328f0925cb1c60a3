"""The Arrow row: one schema whatever the data, and no row that breaks an invariant."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rollout_workers.errors import BadEngineReply
from rollout_workers.schema import (
    SCHEMA_VERSION,
    Row,
    Span,
    TurnRecord,
    check,
    from_ipc,
    record_batch,
    row_id,
    row_schema,
    to_ipc,
)

SCHEMA = row_schema("a-model", "digest")


def turn(start: int, end: int, **fields: Any) -> TurnRecord:
    named = {"response_id": f"resp_{start}", "finish_reason": "stop", "worker": "w0"}
    return TurnRecord(**(named | {"start": start, "end": end} | fields))


def row(**fields: Any) -> Row:
    """Prompt of 3, two generated, a user turn of 2, one generated."""
    made: dict[str, Any] = {
        "trajectory_id": "traj_1",
        "session_id": "s1",
        "prompt_length": 3,
        "token_ids": np.arange(8, dtype=np.int32),
        "loss_mask": np.array([0, 0, 0, 1, 1, 0, 0, 1], np.uint8),
        "logprobs": np.array([0, 0, 0, -0.5, -1, 0, 0, -2], np.float32),
        "versions": (Span(start=3, end=5, version=1), Span(start=7, end=8, version=2)),
        "min_version": 1,
        "max_version": 2,
        "turns": (turn(3, 5), turn(7, 8)),
        "status": "completed",
        "segment_reason": "start",
        "run_id": "run",
    }
    return Row(**(made | fields))


def empty_row(**fields: Any) -> Row:
    nothing: dict[str, Any] = {
        "prompt_length": 0,
        "token_ids": np.empty(0, np.int32),
        "loss_mask": np.empty(0, np.uint8),
        "logprobs": np.empty(0, np.float32),
        "versions": (),
        "turns": (),
        "min_version": 0,
        "max_version": 0,
    }
    return row(**(nothing | {"status": "error", "segment_reason": "empty"} | fields))


def changed(array: Any, at: int, value: float) -> Any:
    copy = array.copy()
    copy[at] = value
    return copy


GOOD = row()
SPANS = GOOD.versions
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "short mask": ({"loss_mask": GOOD.loss_mask[:-1]}, "three lists"),
    "short logprobs": ({"logprobs": GOOD.logprobs[:-1]}, "three lists"),
    "short ids": ({"token_ids": GOOD.token_ids[:-1]}, "three lists"),
    "nan": ({"logprobs": changed(GOOD.logprobs, 3, np.nan)}, "not finite"),
    "minus infinity": ({"logprobs": changed(GOOD.logprobs, 3, -np.inf)}, "not finite"),
    "nan where masked": ({"logprobs": changed(GOOD.logprobs, 0, np.nan)}, "not finite"),
    "mask of 2": ({"loss_mask": changed(GOOD.loss_mask, 3, 2)}, "more than 0 and 1"),
    "logprob in prompt": ({"logprobs": changed(GOOD.logprobs, 0, -1)}, "masked position"),
    "positive": ({"logprobs": changed(GOOD.logprobs, 3, 0.01)}, "above zero"),
    "mask in prompt": ({"loss_mask": changed(GOOD.loss_mask, 2, 1)}, "outside the generations"),
    "mask in context": ({"loss_mask": changed(GOOD.loss_mask, 5, 1)}, "outside the generations"),
    "unmasked sample": (
        {
            "loss_mask": changed(GOOD.loss_mask, 4, 0),
            "logprobs": changed(GOOD.logprobs, 4, 0),
        },
        "tokens_masked_elsewhere is off",
    ),
    "masked elsewhere": ({"tokens_masked_elsewhere": 1}, "tokens_masked_elsewhere is off"),
    "prompt too short": ({"prompt_length": 2}, "prompt_length"),
    "prompt too long": ({"prompt_length": 4}, "prompt_length"),
    "turns overlap": ({"turns": (turn(3, 5), turn(4, 8))}, "turns overlap"),
    "turns out of order": ({"turns": (turn(7, 8), turn(3, 5))}, "turns overlap"),
    "turn leaves the row": ({"turns": (turn(3, 5), turn(7, 9))}, "turns overlap"),
    "turn runs backwards": ({"turns": (turn(5, 3), turn(7, 8))}, "turns overlap"),
    "no turns": ({"turns": ()}, "prompt_length"),
    "gap in versions": ({"versions": SPANS[:1]}, "tile"),
    "versions start late": (
        {"versions": (Span(start=4, end=5, version=1), SPANS[1])},
        "tile",
    ),
    "versions end early": (
        {"versions": (Span(start=3, end=4, version=1), SPANS[1])},
        "tile",
    ),
    "versions overlap": (
        {"versions": (SPANS[0], Span(start=4, end=5, version=1), SPANS[1])},
        "tile",
    ),
    "version over a turn's end": (
        {"versions": (Span(start=3, end=8, version=1),), "max_version": 1},
        "tile",
    ),
    "version without a turn": (
        {"versions": (*SPANS, Span(start=8, end=9, version=2))},
        "outside the generations",
    ),
    "min_version": ({"min_version": 0}, "min_version is off"),
    "max_version": ({"max_version": 3}, "max_version is off"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_row_is_refused(name: str) -> None:
    fields, said = BROKEN[name]
    broken = row(**fields)
    with pytest.raises(BadEngineReply, match=said) as caught:
        check(broken)
    assert "traj_1/0" in str(caught.value)
    assert f"{len(broken.token_ids)} ids" in str(caught.value)
    with pytest.raises(BadEngineReply):
        record_batch([GOOD, broken], SCHEMA)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": changed(GOOD.logprobs, 3, 1e-5)},  # rounding above log(1)
        {
            "versions": (
                Span(start=3, end=4, version=1),
                Span(start=4, end=5, version=4),
                Span(start=7, end=8, version=2),
            ),
            "max_version": 4,
        },
        {
            "loss_mask": np.array([0, 0, 0, 0, 0, 0, 0, 1], np.uint8),
            "logprobs": np.array([0, 0, 0, 0, 0, 0, 0, -2], np.float32),
            "tokens_masked_elsewhere": 2,
        },
    ],
)
def test_sound_rows_pass(fields: dict[str, Any]) -> None:
    check(row(**fields))


def test_rows_without_tokens_pass() -> None:
    check(empty_row())
    check(empty_row(turns=(turn(0, 0),)))  # an engine that stopped at once


def test_values_survive() -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    full = row(
        group_id="g",
        group_size=4,
        turns=(turn(3, 5, seconds=0.5, cached_tokens=2, clamped=True), turn(7, 8, top_k=7)),
        reward=1,
        turn_rewards=(0.5, 2),
        created_at=when,
        routed_experts=b"\x00\xff",
        items='[{"a": "🙂"}]',
    )
    batch = record_batch([full, empty_row(segment=1)], SCHEMA)
    first, second = batch.to_pylist()
    assert first["token_ids"] == list(range(8))
    assert first["loss_mask"] == [0, 0, 0, 1, 1, 0, 0, 1]
    assert first["logprobs"] == [0, 0, 0, -0.5, -1, 0, 0, -2]
    assert first["versions"] == [
        {"start": 3, "end": 5, "version": 1},
        {"start": 7, "end": 8, "version": 2},
    ]
    turns = first["turns"]
    assert (turns[0]["response_id"], turns[0]["end"], turns[0]["clamped"]) == ("resp_3", 5, True)
    assert (turns[0]["cached_tokens"], turns[0]["seconds"], turns[1]["top_k"]) == (2, 0.5, 7)
    assert first["turn_rewards"] == [0.5, 2.0]
    assert first["created_at"] == when
    assert first["routed_experts"] == b"\x00\xff"
    assert first["items"] == '[{"a": "🙂"}]'
    assert second["token_ids"] == second["turns"] == second["versions"] == []
    assert batch.validate(full=True) is None


def test_batches_of_any_content_concatenate() -> None:
    """Types are declared, not inferred: empty lists, nulls and integers fit next to each other."""
    batches = [
        record_batch([empty_row(reward=None)], SCHEMA),
        record_batch([row(reward=1.0, group_id="g", turn_rewards=[1, 2])], SCHEMA),
        record_batch([], SCHEMA),
        record_batch([row(reward=1, error="x", routed_experts=b"")], SCHEMA),
    ]
    assert all(batch.schema.equals(SCHEMA, check_metadata=True) for batch in batches)
    table = pa.Table.from_batches(batches)
    assert pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches]) == table
    assert table.num_rows == 3
    assert table["reward"].type == pa.float64()
    assert table["reward"].to_pylist() == [None, 1.0, 1.0]
    assert table["turn_rewards"].to_pylist() == [None, [1.0, 2.0], None]
    assert table["group_size"].null_count == 3


def test_null_is_not_nan() -> None:
    column = record_batch([row(reward=None), row(reward=float("nan"))], SCHEMA)["reward"]
    assert column.null_count == 1
    assert column.is_valid().to_pylist() == [False, True]


def test_schema_says_what_it_is() -> None:
    assert SCHEMA.metadata == {
        b"version": SCHEMA_VERSION.encode(),
        b"model": b"a-model",
        b"template_digest": b"digest",
    }
    assert SCHEMA.equals(row_schema("a-model", "digest"), check_metadata=True)
    assert not SCHEMA.equals(row_schema("a-model", "other"), check_metadata=True)
    assert SCHEMA.field("token_ids").type == pa.large_list(pa.int32())
    assert SCHEMA.field("loss_mask").type == pa.large_list(pa.uint8())
    assert SCHEMA.field("logprobs").type == pa.large_list(pa.float32())
    assert set(SCHEMA.names) == set(Row.__dataclass_fields__)
    assert {f.name for f in SCHEMA if f.nullable} == {
        "group_id",
        "group_size",
        "reward",
        "turn_rewards",
        "routed_experts",
        "error",
    }


def test_batches_travel_whole_and_are_not_copied_on_arrival() -> None:
    rows = [row(reward=0.5, group_id="g"), empty_row(segment=1), row(segment=2)]
    for batch in (record_batch(rows, SCHEMA), record_batch([], SCHEMA)):
        data = to_ipc(batch)
        before = pa.total_allocated_bytes()
        got = from_ipc(data)
        assert pa.total_allocated_bytes() <= before
        assert got.equals(batch)
        assert got.schema.equals(SCHEMA, check_metadata=True)


def test_row_ids_tell_segments_apart() -> None:
    assert row_id("traj_1", 0) != row_id("traj_1", 1) != row_id("traj_11", 1)


def test_lists_share_one_buffer() -> None:
    rows = [replace(row(), segment=number) for number in range(3)]
    ids = record_batch(rows, SCHEMA)["token_ids"]
    assert len(ids.values) == 24
    assert ids.offsets.to_pylist() == [0, 8, 16, 24]
