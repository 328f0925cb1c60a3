"""The pool as trainers and agents use it, on a real Ray with real worker processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import ray
from pools import marked, scripted

from rollout_workers import RolloutPool, cluster, lease, models
from rollout_workers.errors import (
    BadRequest,
    ConfigError,
    Conflict,
    ModelNotFound,
    NotFound,
    StartFailed,
)
from rollout_workers.pool import _cause

pytestmark = pytest.mark.ray


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": 6, "return_token_ids": True, **fields}


def test_sessions_stay_on_their_worker_and_spread_over_both(pool: RolloutPool) -> None:
    workers: dict[str, set[str]] = {}
    for _ in range(3):
        replies = ray.get([pool.respond(ask("hi"), f"stick-{i}") for i in range(12)])
        for i, reply in enumerate(replies):
            workers.setdefault(f"stick-{i}", set()).add(reply["rollout"]["worker"])
    assert all(len(used) == 1 for used in workers.values())
    spread = Counter(used.pop() for used in workers.values())
    assert len(spread) == 2 and min(spread.values()) >= 4


def test_status_shows_load_version_address_and_age_of_each(pool: RolloutPool) -> None:
    ray.get(pool.respond(ask("hi"), "status-1"))
    status = ray.get(pool.status())
    assert len(status["workers"]) == 2
    for worker in status["workers"]:
        assert worker["state"] == "serving" and worker["version"] == 0
        assert worker["url"].startswith("http://127.0.0.1:") and worker["uptime_s"] > 0
        assert worker["load"]["requests"] == 0 and worker["load"]["tokens"] == 0
    assert sum(worker["load"]["sessions"] for worker in status["workers"]) >= 1
    text = str(status)
    assert "api_key" not in text and "admin_key" not in text


def test_rows_hold_what_was_sampled_and_are_leased_until_acknowledged(pool: RolloutPool) -> None:
    first = ray.get(pool.respond(ask("one"), "rows-1"))["output"][0]
    history = [{"role": "user", "content": "one"}, first, {"role": "user", "content": "two"}]
    second = ray.get(pool.respond(ask("", input=history), "rows-1"))["output"][0]
    seen = first["prompt_token_ids"] + first["generation_token_ids"]
    assert second["prompt_token_ids"][: len(seen)] == seen
    finished = ray.get(pool.finish("rows-1", 0.5, metadata={"task": "t"}))
    batch = take_session(pool, "rows-1")
    row = batch.table.to_pylist()[0]
    assert batch.row_ids == finished["row_ids"]
    assert row["token_ids"] == second["prompt_token_ids"] + second["generation_token_ids"]
    trained = np.array(row["loss_mask"], bool)
    both = first["generation_token_ids"] + second["generation_token_ids"]
    assert np.array(row["token_ids"])[trained].tolist() == both
    logprobs = first["generation_log_probs"] + second["generation_log_probs"]
    assert np.array(row["logprobs"])[trained].tolist() == pytest.approx(logprobs)
    assert (row["reward"], row["metadata"]) == (0.5, '{"task": "t"}')
    with pytest.raises(ValueError, match="read-only"):
        batch.table["token_ids"].chunk(0).values.to_numpy()[0] = 7
    assert ray.get(batch.ack()) == 1
    assert len(ray.get(pool.take(1))) == 0


def take_session(pool: RolloutPool, session_id: str) -> Any:
    batch = ray.get(pool.take(1, wait_s=10))
    assert batch.table["session_id"].to_pylist() == [session_id]
    return batch


def test_taken_rows_outlive_their_buffer() -> None:
    """Here the owner is the taker, so that a restarted buffer cannot take rows back with it."""
    import pools

    from rollout_workers import models

    config = pools.scripted(str(models.resolve("demo:tiny")), name="outlive", workers=1)
    with RolloutPool.start(config) as own:
        ray.get(own.respond(ask("x" * 4000, max_output_tokens=4000), "o-1"))
        ray.get(own.finish("o-1"))
        ref = own.take(1, wait_s=10)
        ray.wait([ref])
        ray.kill(ray.get_actor("outlive.buffer", namespace=cluster.NAMESPACE))
        assert ray.get(ref).table.num_rows == 1


def test_whole_groups_are_taken_together(pool: RolloutPool) -> None:
    for i in range(3):
        ray.get(pool.open_session(f"grp-{i}", group_id="g", group_size=3))
    ray.get([pool.respond(ask("hi"), f"grp-{i}") for i in range(2)])
    ray.get([pool.finish(f"grp-{i}", 1.0) for i in range(2)])
    assert len(ray.get(pool.take(groups=1))) == 0
    ray.get(pool.finish("grp-2", error="the agent never called"))  # a tombstone counts
    batch = ray.get(pool.take(groups=1, wait_s=10))
    rows = batch.table.to_pylist()
    assert sorted(row["session_id"] for row in rows) == ["grp-0", "grp-1", "grp-2"]
    empty = next(row for row in rows if row["session_id"] == "grp-2")
    assert (empty["status"], empty["token_ids"], empty["segment_reason"]) == ("error", [], "empty")
    ray.get(batch.ack())


async def test_async_callers_await_the_same_references(pool: RolloutPool) -> None:
    replies = await asyncio.gather(*(pool.respond(ask("hi"), f"async-{i}") for i in range(4)))
    assert all(reply["status"] == "incomplete" for reply in replies)
    await asyncio.gather(*(pool.finish(f"async-{i}") for i in range(4)))
    batch = await pool.take(4, wait_s=10)
    assert len(batch) == 4 and await batch.ack() == 4


def test_errors_arrive_as_our_own_with_their_fields(pool: RolloutPool) -> None:
    with pytest.raises(BadRequest) as bad:
        ray.get(pool.respond(ask("hi", temperature=9), "err-1"))
    assert (bad.value.param, bad.value.status) == ("temperature", 400)
    with pytest.raises(NotFound):
        ray.get(pool.finish("never-opened"))
    ray.get(pool.respond(ask("hi"), "err-2"))
    ray.get(pool.finish("err-2", 1.0))
    assert ray.get(pool.finish("err-2", 1.0))["session_id"] == "err-2"
    with pytest.raises(Conflict):
        ray.get(pool.finish("err-2", 2.0))
    ray.get(ray.get(pool.take(1, wait_s=10)).ack())


OTHER_PROCESS = """
import sys, ray
from rollout_workers import RolloutPool
name = sys.argv[1]
pool = RolloutPool.connect(name)
body = {"input": "hi", "max_output_tokens": 2}
print("connected", ray.get(pool.respond(body, "other"))["status"])
router = ray.get_actor(name + ".router.0", namespace="rollout_workers")
print("plain", ray.get(router.respond.remote(body))["status"])
"""


def test_another_process_finds_the_pool_by_name(pool: RolloutPool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, pool.name],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["connected", "incomplete", "plain", "incomplete"], done.stderr
    assert ray.get(pool.status())["workers"][0]["state"] == "serving"


def test_the_openai_client_works_against_the_front_door(pool: RolloutPool) -> None:
    with openai.OpenAI(base_url=pool.url, api_key="unused", max_retries=0) as client:
        headers = {"x-session-id": "sdk-1"}
        reply = client.responses.create(
            model=client.models.list().data[0].id,
            input="hi",
            max_output_tokens=4,
            extra_headers=headers,
        )
        assert reply.status == "incomplete" and reply.usage and reply.usage.output_tokens == 4
        with pytest.raises(openai.BadRequestError) as bad:
            client.responses.create(model=pool.name, input="hi", truncation="auto")
        assert bad.value.param == "truncation"


def test_a_name_that_is_taken_is_refused(pool: RolloutPool) -> None:
    with pytest.raises(Conflict, match="runs already"):
        RolloutPool.start(scripted("demo:tiny", name=pool.name))


def test_a_pool_that_cannot_start_says_why_and_leaves_nothing(pool: RolloutPool) -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model"):
        RolloutPool.start(scripted("/no/such/model", name="absent"))
    failing = scripted(
        "demo:tiny", name="failing", start_exit=1, start_log="RuntimeError: CUDA out of memory"
    )
    with pytest.raises(StartFailed, match="out of memory"):
        RolloutPool.start(failing)
    crowded = scripted("demo:tiny", name="crowded")
    crowded["workers"] |= {"resources": {"no_such_resource": 1.0}, "placement_timeout_s": 3}
    with pytest.raises(StartFailed, match="no_such_resource"):
        RolloutPool.start(crowded)
    for name in ("absent", "failing", "crowded"):
        with pytest.raises(NotFound):
            RolloutPool.connect(name)


@pytest.mark.parametrize("shared", [False, True])
def test_a_front_door_that_cannot_open_ends_the_start_at_once_with_its_engines(
    pool: RolloutPool, shared: bool
) -> None:
    mark = uuid.uuid4().hex
    config = scripted("demo:tiny", name="doorless", mark=mark, start_delay_s=100)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config |= {"router": {"http": {"port": port}}, "shared": shared}
        with pytest.raises(StartFailed) as raised:
            RolloutPool.start(config)
    said = f"router.http.port {port} is taken on 127.0.0.1: choose another or 0 for any"
    assert raised.value.message == said
    assert time.monotonic() - began < 60
    assert marked(mark) == [] and lease.actors_of("doorless", cluster.NAMESPACE) == {}


def test_a_model_without_a_chat_template_is_told_and_its_engines_end(
    pool: RolloutPool, tmp_path: Path
) -> None:
    mark = uuid.uuid4().hex
    shutil.copytree(models.resolve("demo:tiny"), tmp_path / "plain")
    for file in (tmp_path / "plain").glob("*"):
        if file.name == "chat_template.jinja":
            file.unlink()
        elif file.name == "tokenizer_config.json":
            fields = json.loads(file.read_text())
            fields.pop("chat_template", None)
            file.write_text(json.dumps(fields))
    config = scripted(str(tmp_path / "plain"), name="speechless", mark=mark, start_delay_s=100)
    with pytest.raises(ConfigError, match="chat template"):
        RolloutPool.start(config | {"shared": True})
    assert marked(mark) == [] and lease.actors_of("speechless", cluster.NAMESPACE) == {}


def test_errors_that_are_not_ours_are_told_with_type_and_text() -> None:
    told = _cause(OSError("no room"))
    assert isinstance(told, StartFailed)
    assert told.message == "the pool could not start: OSError: no room"
    ours = Conflict("twice")
    assert _cause(ours) is ours


def test_a_wildcard_front_door_tells_the_nodes_address(pool: RolloutPool) -> None:
    config = scripted("demo:tiny", name="wide", workers=1)
    config["router"] = {"http": {"host": "0.0.0.0", "api_key": "k"}}
    with RolloutPool.start(config) as wide:
        address = ray.util.get_node_ip_address()
        assert wide.url and wide.url.startswith(f"http://{address}:")
        with openai.OpenAI(base_url=wide.url, api_key="k", max_retries=0) as client:
            assert client.models.list().data
