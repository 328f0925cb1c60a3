"""A pool to measure: over the instant scripted engine of the tests, or the real one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_workers import RolloutPool, models  # first: it sets what Ray reads on import

# isort: split
import ray
from bench_load import Load, Order

from rollout_workers.cluster import NAMESPACE
from rollout_workers.routing import WorkerInfo

_ROOT = Path(__file__).resolve().parent.parent
_SCRIPTED = _ROOT / "tests" / "scripted_engine.py"
MODEL = "demo:tiny"
ACTORS = ("Router", "Buffer", "Controller", "Worker", "Anchor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A running pool of one engine, and a client for both."""

    pool: RolloutPool
    worker: WorkerInfo
    load: Load

    def order(self, kind: str, **fields: Any) -> Order:
        """An order to this pool, or to its engine for kinds that go there."""
        target = {"responses": self.pool.url, "handle": self.pool.name}.get(kind, self.worker.url)
        known = {"target": target, "key": self.worker.api_key, "model": MODEL}
        return Order(kind=kind, **(known | fields))  # type: ignore[arg-type]

    def drain(self) -> None:
        """Take and acknowledge every row, so that no round finds what another left."""
        while len(batch := ray.get(self.pool.take(4096))):
            ray.get(batch.ack())


@contextlib.contextmanager
def running(engine: dict[str, Any]) -> Iterator[Bench]:
    """A pool with one engine, for as long as the block runs."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    config = {
        "name": name,
        "engine": {"model": MODEL, "device": "cpu", **engine},
        "ray": {"num_cpus": 2},
    }
    with RolloutPool.start(config) as pool, Load() as load:
        actor = ray.get_actor(f"{name}.worker.0", namespace=NAMESPACE)
        yield Bench(pool=pool, worker=ray.get(actor.info.remote()), load=load)


def scripted() -> dict[str, Any]:
    """An instant engine in SGLang's reply shapes."""
    vocab_size = models.describe(models.resolve(MODEL)).vocab_size
    script = {"SCRIPTED_ENGINE": json.dumps({"vocab_size": vocab_size})}
    return {"command": [sys.executable, str(_SCRIPTED)], "env": script}


def stock(requests: int) -> dict[str, Any]:
    """The real SGLang with a tiny model, for that many requests at once."""
    args = {"max-total-tokens": 32768, "max-running-requests": requests}
    return {"dtype": "float32", "args": args}


@contextlib.contextmanager
def proxy(target: str) -> Iterator[tuple[str, int]]:
    """Address and pid of a bare proxy before ``target``."""
    argv = [sys.executable, str(Path(__file__).with_name("bench_proxy.py")), target]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.communicate()


def kind(argv: list[str]) -> str | None:
    """Which part of the pool a process is; ``Ray`` for its daemons, None for what is not ours."""
    role = argv[0].removeprefix("ray::").split(".")[0] if argv else ""
    if role in ACTORS:
        return role
    line = " ".join(argv)
    others = ("bench_", "scripted_engine", "sglang.launch_server", "multiprocessing")
    return None if any(name in line for name in others) else "Ray"
