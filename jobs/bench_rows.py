"""What tokens cost on their way in and out: reading a reply, and handing rows to the trainer."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray
from bench_common import Figure, ratios
from bench_pool import Bench

from rollout_workers.cluster import NAMESPACE
from rollout_workers.generation import read_reply
from rollout_workers.schema import Row, Span, TurnRecord, record_batch, to_ipc

_VOCAB = 32_000
_BLOCK = 64  # rows a router sends at once


def parsing(rounds: int) -> list[Figure]:
    """A ``/generate`` reply to checked arrays, against the standard library to lists."""
    return [_parse(count, rounds) for count in (512, 4096)]


def _parse(count: int, rounds: int) -> Figure:
    raw = _reply(count)

    def ours() -> None:
        read_reply(raw, "rid", 100, _VOCAB, (), 0.0)

    def plain() -> tuple[list[int], list[float]]:
        reply = json.loads(raw)
        triples = reply["meta_info"]["output_token_logprobs"]
        return [t[1] for t in triples], [t[0] for t in triples]

    taken = [(_thread_s(plain), _thread_s(ours)) for _ in range(rounds)]
    return Figure(
        name=f"read a reply of {count} tokens: json and lists / ours with checks",
        unit="x",
        rounds=[a / b for a, b in taken],
        better="more",
        must=2.5,
        stretch=5,
    )


def _reply(count: int) -> bytes:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, _VOCAB, count).tolist()
    logprobs = (-rng.exponential(1.0, count)).tolist()
    meta = {
        "id": "rid",
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": 100,
        "completion_tokens": count,
        "weight_versions": [{"version": "0", "start": 0, "end": count}],
        "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
    }
    reply = {"text": "x" * 4 * count, "output_ids": ids, "meta_info": meta}
    return json.dumps(reply, separators=(",", ":")).encode()


def _thread_s(work: Callable[[], object], times: int = 20) -> float:
    started = time.thread_time()
    for _ in range(times):
        work()
    return (time.thread_time() - started) / times


def hand_off(run: Bench, rounds: int) -> list[Figure]:
    """Rows from a router's hands through the spool into the trainer's, touched once."""
    return [
        *_hand_off(run, 64, 16_384, rounds, 60, 20),
        *_hand_off(run, 512, 8_192, rounds, 25, 8),
    ]


def _hand_off(
    run: Bench, count: int, longest: int, rounds: int, must: float, stretch: float
) -> list[Figure]:
    buffer = ray.get_actor(f"{run.pool.name}.buffer", namespace=NAMESPACE)
    router = ray.get_actor(f"{run.pool.name}.router.0", namespace=NAMESPACE)
    schema = ray.get(router.load.remote())
    through, copied, private, size = [], [], [], 0
    for number in range(-1, rounds):
        blocks = _blocks(count, longest, schema, number)
        size = sum(block.nbytes for block in blocks)
        started = time.perf_counter()
        ray.get([buffer.append.remote(to_ipc(block)) for block in blocks])
        appended = time.perf_counter() - started
        before = _private_bytes()  # slow: outside of what is timed
        started = time.perf_counter()
        batch = ray.get(run.pool.take(count))
        taken = time.perf_counter() - started
        after = _private_bytes()
        started = time.perf_counter()
        _touch(batch.table)
        seconds = appended + taken + time.perf_counter() - started
        assert len(batch) == count
        ray.get(batch.ack())
        del batch
        if number >= 0:
            through.append(seconds)
            private.append(100 * max(0, after - before) / size)
            copied.append(_memcpy_s(size))
    what = f"{count} trajectories ({size / 1e6:.0f} MB)"
    return [
        Figure(name=f"append, take and touch {what}", unit="ms", rounds=_ms(through)),
        Figure(
            name=f"append, take and touch {what} / memcpy",
            unit="x",
            rounds=ratios(through, copied),
            must=must,
            stretch=stretch,
        ),
        Figure(
            name=f"private memory after take, {what}",
            unit="% of it",
            rounds=private,
            must=2,
            stretch=0.01,
        ),
    ]


def _ms(seconds: list[float]) -> list[float]:
    return [s * 1e3 for s in seconds]


def _private_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def _touch(table: pa.Table) -> None:
    for name in ("token_ids", "loss_mask", "logprobs"):
        for chunk in table[name].chunks:
            chunk.values.to_numpy().max()


def _memcpy_s(size: int) -> float:
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(target, source)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _blocks(count: int, longest: int, schema: pa.Schema, seed: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(seed + 1)
    lengths = np.exp(rng.uniform(np.log(1024), np.log(longest), count)).astype(int)
    rows = [_row(f"traj_{count}_{seed}_{i}", int(n)) for i, n in enumerate(lengths)]
    return [record_batch(rows[i : i + _BLOCK], schema) for i in range(0, count, _BLOCK)]


def _row(name: str, length: int) -> Row:
    prompt = length // 4
    mask = np.zeros(length, np.uint8)
    mask[prompt:] = 1
    record = TurnRecord(
        response_id=name, start=prompt, end=length, finish_reason="stop", worker="w0"
    )
    known: dict[str, Any] = {"run_id": "bench", "status": "completed", "segment_reason": "start"}
    return Row(
        trajectory_id=name,
        session_id=name,
        prompt_length=prompt,
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=-mask.astype(np.float32),
        versions=[Span(start=prompt, end=length, version=0)],
        min_version=0,
        max_version=0,
        turns=[record],
        **known,
    )
