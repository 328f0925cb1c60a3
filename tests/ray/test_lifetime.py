"""However a driver ends, no engine of its pool is left ten seconds later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from pools import ended, marked, scripted, wait_gone

from rollout_workers import models

pytestmark = pytest.mark.ray

DRIVER = """
import json, os, sys, time
from rollout_workers import RolloutPool
config, end = json.loads(sys.argv[1]), sys.argv[2]
print("begin", flush=True)
pool = RolloutPool.start(config)
print("ready", flush=True)
if end == "raise":
    raise ValueError("as planned")
if end == "stop":
    import ray
    ray.get(pool.stop())
if end == "wait":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def tiny() -> str:
    return str(models.resolve("demo:tiny"))


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def drive(tiny: str, mark: str, end: str, **script: object) -> subprocess.Popen[str]:
    import json

    config = scripted(tiny, name=f"life-{mark[:8]}", mark=mark, children=1, **script)
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(config), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_line(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.strip() == word:
            return
    assert process.stderr
    pytest.fail(f"driver ended before {word!r}:\n{process.stderr.read()[-2000:]}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_signal_to_a_ready_driver_leaves_no_engine(
    tiny: str, mark: str, number: signal.Signals
) -> None:
    with ended(drive(tiny, mark, "wait")) as driver:
        await_line(driver, "ready")
        assert len(marked(mark)) >= 4  # two engines with a child each
        driver.send_signal(number)
        assert wait_gone(mark) == []


@pytest.mark.parametrize("end", ["return", "raise", "stop"])
def test_a_driver_that_ends_by_itself_leaves_no_engine(tiny: str, mark: str, end: str) -> None:
    with ended(drive(tiny, mark, end)) as driver:
        await_line(driver, "ready")
        code = driver.wait(60)
        assert (code != 0) is (end == "raise")
        assert wait_gone(mark) == []


def test_a_driver_killed_while_its_engines_load_leaves_none(tiny: str, mark: str) -> None:
    with ended(drive(tiny, mark, "wait", start_delay_s=60)) as driver:
        await_line(driver, "begin")
        deadline = time.monotonic() + 60
        while len(marked(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(mark)
        driver.kill()
        assert wait_gone(mark) == []


def test_nothing_of_a_private_ray_stays_after_close(tiny: str, mark: str) -> None:
    before = set(os.listdir("/tmp"))
    with ended(drive(tiny, mark, "stop")) as driver:
        await_line(driver, "ready")
        rays = [Path("/tmp") / n for n in set(os.listdir("/tmp")) - before if "rw-ray-" in n]
        driver.wait(60)
    assert rays
