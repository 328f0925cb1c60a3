"""A worker as a Ray actor over the scripted engine: its answers, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollout_workers.config import EngineConfig
from rollout_workers.errors import ConfigError, ModelNotFound, StartFailed
from rollout_workers.processes import ProcessId, identify, tree
from rollout_workers.routing import WorkerInfo
from rollout_workers.worker import Worker

pytestmark = pytest.mark.ray

ENGINE = Path(__file__).parents[1] / "scripted_engine.py"
Spawn = Callable[..., Any]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A private Ray; its workers keep what they share on the node in a place of their own."""
    import ray

    with tempfile.TemporaryDirectory(prefix="rw-") as base:
        env = {"env_vars": {"TMPDIR": base}}
        ray.init(
            address="local", num_cpus=4, include_dashboard=False, _temp_dir=f"{base}/ray",
            runtime_env=env, log_to_driver=False,
        )  # fmt: skip
        yield ray
        ray.shutdown()


@pytest.fixture
def spawn(ray: Any) -> Iterator[Spawn]:
    """Makes worker actors, with a scripted engine unless told otherwise; kills them at the end."""
    actors: list[Any] = []

    def make(
        script: dict[str, object] | None = None, routers: tuple[str, ...] = (), **settings: object
    ) -> Any:
        defaults: dict[str, object] = {
            "model": "demo:tiny",
            "device": "cpu",
            "command": [sys.executable, str(ENGINE)],
            "env": {"SCRIPTED_ENGINE": json.dumps(script or {})},
        }
        config = EngineConfig.model_validate(defaults | settings)
        actor = ray.remote(Worker).options(num_cpus=0).remote("pool.worker.0", config, routers)
        actors.append(actor)
        return actor

    yield make
    for actor in actors:
        ray.kill(actor)


def tree_of(pid: int) -> set[ProcessId]:
    root = identify(pid)
    return tree(root) if root else set()


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.05)


def all_gone(processes: set[ProcessId]) -> bool:
    return not any(process.alive for process in processes)


async def actor_pid(actor: Any) -> int:
    """The actor's own process: the engine's pid comes only with ``info``."""
    return int(await actor.__ray_call__.remote(lambda _: os.getpid()))


async def test_a_worker_starts_serves_and_stops(ray: Any, spawn: Spawn) -> None:
    worker = spawn({"children": 1})
    assert await worker.info.remote() is None and await worker.log_tail.remote() == []
    info: WorkerInfo = await worker.start.remote(version=5)
    assert info == await worker.info.remote()
    assert (info.name, info.version, info.vocab_size) == ("pool.worker.0", 5, 1024)
    assert (info.context_length, info.max_prompt_tokens) == (8192, 8186)
    assert info.node_id == ray.get_runtime_context().get_node_id()
    assert info.url.startswith("http://127.0.0.1:")
    assert info.api_key != info.admin_key and len(info.api_key) > 30

    processes = tree_of(info.pid)
    assert {os.getpgid(process.pid) for process in processes} == {await actor_pid(worker)}
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
    headers = {"Authorization": f"Bearer {info.api_key}"}
    async with (
        aiohttp.ClientSession(info.url) as session,
        session.post("/generate", json=body, headers=headers) as reply,
    ):
        assert len((await reply.json())["output_ids"]) == 4

    with pytest.raises(StartFailed, match="has an engine already"):
        await worker.start.remote()
    await worker.stop.remote()
    assert all_gone(processes) and await worker.info.remote() is None
    assert "it was stopped" in await worker.wait_exit.remote()


async def test_a_worker_can_start_again_after_its_engine_ended(spawn: Spawn) -> None:
    worker = spawn({"start_log": "Load weight begin."})
    first = await worker.start.remote()
    waiting = worker.wait_exit.remote()
    os.kill(first.pid, signal.SIGKILL)
    said = await waiting
    assert said.startswith("engine of pool.worker.0 ended by SIGKILL: the engine was killed")
    assert said.endswith("last log line: Load weight begin.")
    assert await worker.info.remote() is None
    second = await worker.start.remote(version=1)
    assert second.pid != first.pid and second.api_key != first.api_key
    assert await worker.log_tail.remote(1) == ["Load weight begin."]


async def test_an_exit_is_told_before_what_it_left_is_cleared(spawn: Spawn) -> None:
    worker = spawn()
    info = await worker.start.remote()

    def stall(actor: Any) -> None:
        destroy = actor._server._destroy

        async def late() -> None:
            await asyncio.sleep(5)
            await destroy()

        actor._server._destroy = late

    await worker.__ray_call__.remote(stall)
    waiting = worker.wait_exit.remote()
    began = time.monotonic()
    os.kill(info.pid, signal.SIGKILL)
    assert "ended by SIGKILL" in await waiting and time.monotonic() - began < 3
    again = await worker.start.remote()  # which waits until all is cleared
    assert again.pid != info.pid and time.monotonic() - began > 4


async def test_a_router_elsewhere_reaches_it_at_the_nodes_address(ray: Any, spawn: Spawn) -> None:
    here = ray.get_runtime_context().get_node_id()
    address = ray.util.get_node_ip_address()
    info = await spawn(routers=("another-node", here)).start.remote()
    assert info.url.startswith(f"http://{address}:")
    info = await spawn(routers=(here,)).start.remote()
    assert info.url.startswith("http://127.0.0.1:")


async def test_errors_arrive_whole(spawn: Spawn) -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model does not exist"):
        await spawn(model="/no/such/model").start.remote()
    with pytest.raises(ConfigError, match="--port cannot be given here"):
        await spawn(args={"port": 1}).start.remote()
    with pytest.raises(StartFailed) as raised:
        await spawn(device="cuda", env={"CUDA_VISIBLE_DEVICES": ""}).start.remote()
    assert raised.value.message.startswith("no GPU for engine.device = cuda")
    failing = {"start_exit": 1, "start_log": "torch.OutOfMemoryError: CUDA out of memory."}
    with pytest.raises(StartFailed) as raised:
        await spawn(failing).start.remote()
    assert raised.value.message.startswith("out of memory: torch.OutOfMemoryError: CUDA out of")
    assert (raised.value.code, raised.value.retryable) == ("start_failed", False)


async def test_workers_that_start_at_once_do_not_collide(spawn: Spawn) -> None:
    workers = [spawn() for _ in range(4)]
    infos = await asyncio.gather(*(worker.start.remote() for worker in workers))
    assert len({info.url for info in infos}) == len({info.api_key for info in infos}) == 4
    await asyncio.gather(*(worker.stop.remote() for worker in workers))
    assert not any(identify(info.pid) for info in infos)


async def test_stop_while_it_starts(spawn: Spawn) -> None:
    worker = spawn({"start_delay_s": 60, "children": 1})
    starting = worker.start.remote()
    pid = await engine_pid(worker)
    await worker.stop.remote()
    with pytest.raises(StartFailed, match="was stopped while it started"):
        await starting
    assert not identify(pid)


async def engine_pid(worker: Any) -> int:
    """The engine's pid as soon as it has one, from the processes below the actor."""
    owner, found = await actor_pid(worker), set[ProcessId]()
    await until(lambda: found.update(p for p in tree_of(owner) if p.pid != owner) or found, 30)
    return min(found, key=lambda process: process.started).pid


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("how", ["sigkill", "ray.kill"])
async def test_nothing_outlives_the_actor(ray: Any, spawn: Spawn, how: str, ready: bool) -> None:
    worker = spawn({"children": 3, "start_delay_s": 0 if ready else 60})
    owner = await actor_pid(worker)
    starting = worker.start.remote()
    pid = (await starting).pid if ready else await engine_pid(worker)
    processes = tree_of(pid)
    if not ready:
        await until(lambda: len(processes.update(tree_of(pid)) or processes) >= 3)
    if how == "sigkill":
        os.kill(owner, signal.SIGKILL)
    else:
        ray.kill(worker)
    await until(lambda: all_gone(processes))
    if not ready:
        with pytest.raises(ray.exceptions.RayActorError):
            await starting


async def test_the_next_worker_clears_what_a_dead_one_left(spawn: Spawn) -> None:
    """What a dead owner left is on record, even if its engine is none of our Pythons."""
    worker = spawn()
    info = await worker.start.remote()
    record = Path(info.log_path).parents[1]
    os.kill(await actor_pid(worker), signal.SIGKILL)
    await until(lambda: not identify(info.pid))
    run_dirs = list((record / "run").iterdir())
    assert run_dirs, "a killed actor cannot remove its key file"
    await spawn().start.remote()
    assert not set(run_dirs) & set((record / "run").iterdir())


DRIVER = """
import asyncio, os, sys, ray
from rollout_workers.config import EngineConfig
from rollout_workers.worker import Worker

env = {"env_vars": {"TMPDIR": sys.argv[1]}}
ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=f"{sys.argv[1]}/ray",
         runtime_env=env, log_to_driver=False)
worker = ray.remote(Worker).remote("w0", EngineConfig.model_validate_json(sys.argv[2]))
print(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())), flush=True)
ray.get(worker.start.remote())
"""


@pytest.mark.parametrize("processes_up", [1, 3])
async def test_nothing_outlives_a_killed_driver(processes_up: int) -> None:
    """Ray itself dies with its driver here, so nobody kills process groups: each must see to it."""
    config = EngineConfig(
        model="demo:tiny",
        device="cpu",
        command=[sys.executable, str(ENGINE)],
        env={"SCRIPTED_ENGINE": json.dumps({"children": 3, "start_delay_s": 60})},
    )
    with tempfile.TemporaryDirectory(prefix="rw-", ignore_cleanup_errors=True) as base:
        argv = [sys.executable, "-c", DRIVER, base, config.model_dump_json()]
        driver = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        assert driver.stdout
        owner = int(await driver.stdout.readline())
        seen: set[ProcessId] = set()
        await until(lambda: len(seen.update(tree_of(owner)) or seen) > processes_up, 60)
        driver.kill()
        await driver.wait()
        await until(lambda: all_gone(seen))
