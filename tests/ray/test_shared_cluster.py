"""Pools in a cluster that outlives their drivers: the life line, and a worker that is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import ray
from pools import ended, marked, scripted, wait_gone
from test_lifetime import DRIVER, await_line

from rollout_workers import RolloutPool, cluster, models
from rollout_workers.errors import Conflict, NotFound, RolloutError

pytestmark = pytest.mark.ray


def drive(pool: RolloutPool, config: dict[str, Any], end: str) -> subprocess.Popen[str]:
    """A driver of its own that joins the cluster in which ``pool`` runs."""
    note = cluster.find(pool.name)
    assert note is not None
    config["ray"] = {"address": note.address}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": note.token_path}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(config), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **token},
    )


def gone(name: str, seconds: float = 10.0) -> bool:
    """Whether no actor of a pool can be found by name any more."""
    deadline = time.monotonic() + seconds
    roles = ("controller", "router.0", "buffer", "worker.0", "worker.1")
    while time.monotonic() < deadline:
        named = {a["name"] for a in ray.util.list_named_actors(all_namespaces=True)}
        if not named & {f"{name}.{role}" for role in roles}:
            return True
        time.sleep(0.2)
    return False


@pytest.mark.parametrize("moment", ["ready", "loading"])
def test_a_killed_driver_takes_its_pool_with_it_and_nothing_else(
    pool: RolloutPool, moment: str
) -> None:
    mark = uuid.uuid4().hex
    name = f"leased-{mark[:8]}"
    delay = {"start_delay_s": 60} if moment == "loading" else {}
    config = scripted(pool_model(), name=name, mark=mark, children=1, **delay)
    with ended(drive(pool, config, "wait")) as driver:
        await_line(driver, "begin" if moment == "loading" else "ready")
        deadline = time.monotonic() + 60
        while len(marked(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(marked(mark)) >= 2
        driver.kill()
        assert wait_gone(mark) == []
        assert gone(name)
    assert all(w["state"] == "serving" for w in ray.get(pool.status())["workers"])


def test_a_shared_pool_outlives_its_driver_until_it_is_stopped(pool: RolloutPool) -> None:
    mark = uuid.uuid4().hex
    name = f"shared-{mark[:8]}"
    config = scripted(pool_model(), name=name, mark=mark, workers=1) | {"shared": True}
    with ended(drive(pool, config, "return")) as driver:
        assert driver.wait(120) == 0
    joined = RolloutPool.connect(name)
    assert ray.get(joined.respond({"input": "hi", "max_output_tokens": 2}))["usage"]
    ray.get(joined.stop())
    assert wait_gone(mark) == [] and gone(name)
    with pytest.raises(NotFound):
        RolloutPool.connect(name)


def kill(name: str) -> None:
    ray.kill(ray.get_actor(name, namespace=cluster.NAMESPACE))


def test_what_a_lost_controller_leaves_is_told_and_ended_by_name(pool: RolloutPool) -> None:
    mark = uuid.uuid4().hex
    name = f"headless-{mark[:8]}"
    own = RolloutPool.start(scripted(pool_model(), name=name, mark=mark) | {"shared": True})
    kill(f"{name}.controller")
    with pytest.raises(RolloutError, match=f"the controller of pool '{name}' was lost"):
        own.wait()
    with pytest.raises(NotFound, match=f"{name}.worker.1 still run: end them with"):
        RolloutPool.connect(name)
    with pytest.raises(Conflict, match="rollout-workers stop"):
        RolloutPool.start(scripted(pool_model(), name=name))
    assert marked(mark)
    word = RolloutPool.end(name)
    roles = ("buffer", "router.0", "worker.0", "worker.1")
    assert word["cleared"] == [f"{name}.{role}" for role in roles] and word["left"] == []
    assert word["unread"] == 0
    assert wait_gone(mark) == [] and gone(name, 1)
    with pytest.raises(NotFound, match="no pool named"):
        RolloutPool.end(name)
    assert own.close() == {}
    assert all(w["state"] == "serving" for w in ray.get(pool.status())["workers"])


def test_an_orderly_stop_ends_the_wait(pool: RolloutPool) -> None:
    name = f"waited-{uuid.uuid4().hex[:8]}"
    own = RolloutPool.start(scripted(pool_model(), name=name, workers=1))
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(own.wait)
        time.sleep(0.5)
        assert not waiting.done()
        word = RolloutPool.end(name)
        assert "cleared" not in word and word["unread"] == 0
        waiting.result(20)
    assert own.close() == {}


def test_sessions_of_a_lost_worker_go_on_elsewhere_with_the_same_ids(pool: RolloutPool) -> None:
    name = f"lossy-{uuid.uuid4().hex[:8]}"
    with RolloutPool.start(scripted(pool_model(), name=name)) as own:
        body = {"input": "one", "max_output_tokens": 5, "return_token_ids": True}
        first = ray.get(own.respond(body, "s"))
        item, worker = first["output"][0], first["rollout"]["worker"]
        status = ray.get(own.status())
        pid = next(w["pid"] for w in status["workers"] if w["name"] == worker)
        psutil.Process(pid).kill()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            states = {w["name"]: w for w in ray.get(own.status())["workers"]}
            if states[worker]["state"] == "down":
                break
            time.sleep(0.1)
        assert states[worker]["state"] == "down" and "SIGKILL" in states[worker]["reason"]
        history = [{"role": "user", "content": "one"}, item, {"role": "user", "content": "two"}]
        second = ray.get(own.respond({**body, "input": history}, "s"))
        seen = item["prompt_token_ids"] + item["generation_token_ids"]
        assert second["output"][0]["prompt_token_ids"][: len(seen)] == seen
        assert second["rollout"]["worker"] != worker
        routes = ray.get(own.status())["routers"][0]["routes"]
        assert routes["pinned_lost"] == 1


def pool_model() -> str:
    return str(models.resolve("demo:tiny"))
