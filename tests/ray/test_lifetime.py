"""However a driver ends, no engine of its pool is left ten seconds later."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid

import pytest
from pools import ended, marked, rays_of, scripted, still_there, wait_gone

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
    print("stopped", flush=True)
    time.sleep(600)
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_a_ready_driver_leaves_no_process(
    tiny: str, mark: str, number: signal.Signals
) -> None:
    with ended(drive(tiny, mark, "wait")) as driver:
        await_line(driver, "ready")
        assert len(marked(mark)) >= 4  # two engines with a child each
        _, processes = rays_of(driver.pid)
        driver.send_signal(number)
        assert wait_gone(mark) == []
        assert still_there(processes) == set()


@pytest.mark.parametrize("end", ["return", "raise"])
def test_a_driver_that_ends_by_itself_leaves_nothing(tiny: str, mark: str, end: str) -> None:
    with ended(drive(tiny, mark, end)) as driver:
        await_line(driver, "ready")
        directories, _ = rays_of(driver.pid)
        assert (driver.wait(60) != 0) is (end == "raise")
        assert wait_gone(mark) == []
        assert not any(directory.exists() for directory in directories)


def test_a_driver_killed_while_its_engines_load_leaves_none(tiny: str, mark: str) -> None:
    with ended(drive(tiny, mark, "wait", start_delay_s=60)) as driver:
        await_line(driver, "begin")
        deadline = time.monotonic() + 60
        while len(marked(mark)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert marked(mark)
        driver.kill()
        assert wait_gone(mark) == []


def test_after_stop_no_engine_is_left_while_the_driver_goes_on(tiny: str, mark: str) -> None:
    with ended(drive(tiny, mark, "stop")) as driver:
        await_line(driver, "ready")
        await_line(driver, "stopped")
        assert marked(mark) == []
