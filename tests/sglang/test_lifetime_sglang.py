"""A driver that is killed takes its stock SGLang servers with it, loading or ready."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid

import pytest
from pools import ended, marked, rays_of, scripted, still_there, wait_gone
from test_lifetime import DRIVER, await_line

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("moment", ["loading", "ready"])
def test_a_killed_driver_leaves_no_process(moment: str) -> None:
    mark = uuid.uuid4().hex
    config = scripted("demo:tiny", name=f"killed-{mark[:8]}", mark=mark, workers=1)
    del config["engine"]["command"]  # the stock server instead
    config["engine"] |= {"dtype": "float32", "args": {"max-total-tokens": 16384}}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(config), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(driver):
        await_line(driver, "begin")
        if moment == "ready":
            await_line(driver, "ready")
        else:
            deadline = time.monotonic() + 90
            while not marked(mark) and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(6)  # its children are importing
        assert marked(mark)
        _, processes = rays_of(driver.pid)
        driver.kill()
        assert wait_gone(mark) == []
        assert still_there(processes) == set()
