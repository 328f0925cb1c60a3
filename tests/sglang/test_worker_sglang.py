"""A worker over the real SGLang, on CPU: it serves, keeps its keys, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import ray

from rollout_workers.config import EngineConfig
from rollout_workers.errors import ModelNotFound, StartFailed
from rollout_workers.processes import ProcessId, identify, tree
from rollout_workers.routing import WorkerInfo
from rollout_workers.worker import Worker

pytestmark = pytest.mark.sglang

Spawn = Callable[..., Any]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A place of their own for what workers share on a node, and a Ray if there is none yet."""
    with tempfile.TemporaryDirectory(prefix="rw-") as directory:
        own = not ray.is_initialized()
        if own:
            ray.init(
                address="local",
                num_cpus=4,
                include_dashboard=False,
                _temp_dir=f"{directory}/ray",
                log_to_driver=False,
            )
        yield directory
        if own:
            ray.shutdown()


@pytest.fixture
def spawn(base: str) -> Iterator[Spawn]:
    actors: list[Any] = []
    options: dict[str, Any] = {"num_cpus": 0, "runtime_env": {"env_vars": {"TMPDIR": base}}}

    def make(**settings: object) -> Any:
        defaults: dict[str, object] = {"model": "demo:tiny", "device": "cpu"}
        config = EngineConfig.model_validate(defaults | settings)
        actors.append(ray.remote(Worker).options(**options).remote("w0", config))
        return actors[-1]

    yield make
    for actor in actors:
        ray.kill(actor)


def tree_of(pid: int) -> set[ProcessId]:
    root = identify(pid)
    return tree(root) if root else set()


async def until(condition: Callable[[], object], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


async def actor_pid(actor: Any) -> int:
    return int(await actor.__ray_call__.remote(lambda _: os.getpid()))


async def test_it_serves_and_dies_with_its_actor(spawn: Spawn) -> None:
    worker, refused = spawn(), spawn(args={"no-such-flag": 1})
    ready = worker.start.remote(version=0)
    with pytest.raises(StartFailed) as raised:
        await refused.start.remote()
    message = raised.value.message
    assert message.startswith("SGLang refuses its command line: ") and "--no-such-flag" in message

    info: WorkerInfo = await ready
    assert (info.vocab_size, info.context_length, info.max_prompt_tokens) == (1024, 8192, 8186)
    assert info.max_total_tokens == 32768
    await check_generation(info)
    await check_keys(info)

    processes = tree_of(info.pid)
    assert len(processes) >= 3
    lines = "\n".join(map(command_line, processes))
    assert info.api_key not in lines and info.admin_key not in lines
    log = "\n".join(await worker.log_tail.remote(10_000))
    assert "server_args=" in log and info.api_key not in log and info.admin_key not in log

    os.kill(await actor_pid(worker), signal.SIGKILL)
    await until(lambda: not any(process.alive for process in processes), 10)


def command_line(process: ProcessId) -> str:
    return Path(f"/proc/{process.pid}/cmdline").read_text()


async def check_generation(info: WorkerInfo) -> None:
    body = {
        "input_ids": [40, 41, 42],
        "sampling_params": {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    reply = await post(info, "/generate", info.api_key, body)
    meta = reply["meta_info"]
    assert len(reply["output_ids"]) == 8 == len(meta["output_token_logprobs"])
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 8}]


async def post(info: WorkerInfo, path: str, key: str | None, body: object) -> Any:
    """The JSON of a reply, or the status of one that refuses."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with aiohttp.ClientSession(info.url, headers=headers) as session:
        if body is None:
            async with session.get(path) as reply:
                return reply.status
        async with session.post(path, json=body) as reply:
            return await reply.json() if reply.status == 200 else reply.status


async def check_keys(info: WorkerInfo) -> None:
    generate = {"input_ids": [40], "sampling_params": {"max_new_tokens": 1}}
    for key in (None, "wrong", info.admin_key):
        assert await post(info, "/generate", key, generate) == 401
        assert await post(info, "/server_info", key, None) == 401
    control = ("/flush_cache", "/pause_generation", "/update_weights_from_disk", "/abort_request")
    for path in control:
        for key in (None, "wrong", info.api_key):
            assert await post(info, path, key, {}) == 401
    assert await post(info, "/server_info", info.api_key, None) == 200


async def test_a_model_that_is_not_there(spawn: Spawn) -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model does not exist"):
        await spawn(model="/no/such/model").start.remote()


@pytest.mark.parametrize("processes_up", [1, 2, 4])
async def test_it_dies_with_its_actor_while_it_starts(spawn: Spawn, processes_up: int) -> None:
    """At 1 only main runs; the others come up within milliseconds, and then import for long."""
    worker = spawn()
    owner = await actor_pid(worker)
    starting = worker.start.remote()
    seen: set[ProcessId] = set()

    def enough() -> bool:
        seen.update(process for process in tree_of(owner) if process.pid != owner)
        return len(seen) >= processes_up

    await until(enough, 200)
    os.kill(owner, signal.SIGKILL)
    await until(lambda: not any(process.alive for process in seen), 10)
    with pytest.raises(Exception, match="actor"):
        await starting
