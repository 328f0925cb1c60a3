"""Rows hold exactly what the real engine sampled, and its logprobs are the model's own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import ray
from collector import Collector, task_episodes
from recorder import Recorder
from results import Errors, Reporter, Writer
from tasks import Task

from rollout_workers import RolloutPool, cluster
from rollout_workers.template import ChatTemplate

pytestmark = pytest.mark.sglang
SESSIONS, TURNS = 16, 3
GENERATION = "<|im_end|>\n<|im_start|>assistant\n"


def actor(pool: RolloutPool, role: str) -> Any:
    return ray.get_actor(f"{pool.name}.{role}", namespace=cluster.NAMESPACE)


@pytest.fixture
def recorder(pool: RolloutPool) -> Iterator[Recorder]:
    workers = ray.get([actor(pool, f"worker.{i}").info.remote() for i in range(2)])
    router = actor(pool, "router.0")
    recording = Recorder(workers)
    with recording as behind:
        ray.get(router.set_roster.remote(behind, 0))
        yield recording
        ray.get(router.set_roster.remote(workers, 0))


def said(session: str, turn: int) -> str:
    return f"{session} says héllo 🙂 {turn}"


async def converse(pool: RolloutPool, session: str, **sampling: Any) -> list[dict[str, Any]]:
    """A session of three turns; returns the last output item of each."""
    history: list[Any] = []
    items = []
    for turn in range(TURNS):
        history.append({"role": "user", "content": said(session, turn)})
        body = {"input": history, "max_output_tokens": 5 + 7 * turn, "return_token_ids": True}
        reply = await pool.respond({**body, **sampling}, session)
        items.append(reply["output"][-1])
        history.append(items[-1])
    await pool.finish(session, reward=1.0)
    return items


async def roll_out(pool: RolloutPool, prefix: str, **sampling: Any) -> list[dict[str, Any]]:
    names = [f"{prefix}-{i}" for i in range(SESSIONS)]
    await asyncio.gather(*(converse(pool, name, **sampling) for name in names))
    batch = await pool.take(SESSIONS, wait_s=30)
    await batch.ack()
    rows = batch.table.to_pylist()
    assert sorted(row["session_id"] for row in rows) == sorted(names)
    return rows


async def test_rows_are_what_the_engine_was_sent_and_returned(
    pool: RolloutPool, recorder: Recorder, tiny: Path
) -> None:
    template = ChatTemplate(tiny)
    rows = await roll_out(pool, "truth", temperature=1.3)
    assert len(recorder.calls) == SESSIONS * TURNS
    check_against(recorder, rows)
    for row in rows:
        for number, turn in enumerate(row["turns"]):
            asked = row["token_ids"][: turn["start"]]
            end = row["turns"][number - 1]["end"] if number else 0
            text = template.decode(asked[end:], special=True)
            assert text.endswith(said(row["session_id"], number) + GENERATION)
    assert len({row["turns"][0]["worker"] for row in rows}) == 2


async def test_files_of_collect_are_what_the_engine_was_sent_and_returned(
    pool: RolloutPool, recorder: Recorder, tmp_path: Path
) -> None:
    task = Task("chain_sum", 4, seed=1)
    with Reporter(total=8) as reporter:
        collector = Collector(pool, Writer(tmp_path), reporter, Errors())
        await collector.run(task_episodes(task, "truth", 4, 2, 3), concurrency=8)
    rows = pq.read_table(tmp_path).to_pylist()
    assert len(rows) == 8 and len(recorder.calls) == sum(len(row["turns"]) for row in rows)
    check_against(recorder, rows)


def check_against(recorder: Recorder, rows: list[dict[str, Any]]) -> None:
    by_response = {request["rid"]: (request, reply) for request, reply in recorder.calls}
    for row in rows:
        ids, mask, logprobs = row["token_ids"], row["loss_mask"], row["logprobs"]
        assert len(ids) == len(mask) == len(logprobs) and row["num_segments"] == 1
        sampled = [by_response[turn["response_id"]] for turn in row["turns"]]
        for turn, (request, reply) in zip(row["turns"], sampled, strict=True):
            triples = reply["meta_info"]["output_token_logprobs"]
            assert request["input_ids"] == ids[: turn["start"]]
            assert reply["output_ids"] == ids[turn["start"] : turn["end"]]
            at = slice(turn["start"], turn["end"])
            assert logprobs[at] == [np.float32(t[0]) for t in triples]
            assert mask[at] == [1] * len(triples)
        assert sum(mask) == sum(len(reply["output_ids"]) for _, reply in sampled)
        assert len({turn["worker"] for turn in row["turns"]}) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
async def test_logprobs_agree_with_a_forward_pass(
    pool: RolloutPool, tiny: Path, temperature: float
) -> None:
    rows = await roll_out(pool, f"lp{temperature}", temperature=temperature)
    trained = 0
    for row in rows:
        expected, best = forward(tiny, row["token_ids"], temperature or 1.0)
        mask = np.array(row["loss_mask"], bool)
        assert np.abs(expected - np.array(row["logprobs"]))[mask].max() < 1e-4
        if temperature == 0.0:
            assert (best == np.array(row["token_ids"]))[mask].all()
        trained += int(mask.sum())
    assert trained > SESSIONS * TURNS


def forward(model_dir: Path, ids: list[int], temperature: float) -> tuple[Any, Any]:
    """Logprob of each id given those before it, and the likeliest id there: ``[num_tokens]``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    pad = np.zeros(1)
    return np.concatenate([pad, chosen.numpy()]), np.concatenate([pad, logits.argmax(-1).numpy()])
