"""The collect job as `ray job submit` runs it, on a head with a token, started for these tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from pools import SCRIPTED, marked, wait_gone

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
NAMED = """
import ray
ray.init(address="auto", log_to_driver=False)
print("named", [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)])
"""


@dataclass(frozen=True)
class Head:
    """A running head: where it is and what reaches it."""

    dashboard: str
    address: str
    environment: dict[str, str]
    spools: Path

    def ray(self, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "ray"), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            env=self.environment | {"RAY_API_SERVER_ADDRESS": self.dashboard},
        )

    def submit(
        self, job: str, mark: str, *arguments: str, wait: bool = True, **script: object
    ) -> str:
        """Submit the collect job with scripted engines; returns what the command printed."""
        settings = {
            "name": job,
            "engine.command": [sys.executable, str(SCRIPTED)],
            "engine.model": "demo:tiny",
            "engine.env": {"RW_TEST_MARK": mark, "SCRIPTED_ENGINE": json.dumps(script)},
            "buffer.directory": str(self.spools),
        }
        sets = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        way = ["--working-dir", ".", "--submission-id", job] + ([] if wait else ["--no-wait"])
        command = ["python", "jobs/collect.py", *sets, *arguments]
        return self.ray("job", "submit", *way, "--", *command).stdout

    def status(self, job: str) -> str:
        return self.ray("job", "status", job).stdout.upper()

    def named_actors(self) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", NAMED],
            capture_output=True,
            text=True,
            timeout=60,
            env=self.environment | {"RAY_ADDRESS": self.address},
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("named ")]
        assert lines, done.stderr
        return list(json.loads(lines[-1].removeprefix("named ").replace("'", '"')))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.2", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in taken]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(
        prefix="rw-job-", dir="/tmp", ignore_cleanup_errors=True
    ) as base:
        token = Path(base) / "token"
        token.touch(mode=0o600)
        token.write_text(uuid.uuid4().hex * 2)
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        outside = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        environment = outside | own | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        gcs, dashboard, agent, client = free_ports(4)
        arguments = {
            "node-ip-address": "127.0.0.2",
            "port": gcs,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": agent,
            "ray-client-server-port": client,
            "temp-dir": f"{base}/ray",
            "num-cpus": 4,
        }
        flags = ["--head", "--block", "--disable-usage-stats"]
        flags += [f"--{key}={value}" for key, value in arguments.items()]
        log = Path(base) / "head.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [str(BIN / "ray"), "start", *flags], stdout=file, stderr=file, env=environment
            )
        try:
            found = Head(
                f"http://127.0.0.1:{dashboard}", f"127.0.0.2:{gcs}", environment, Path(base)
            )
            until_up(found, process, log)
            yield found
        finally:
            end_tree(process)


def until_up(head: Head, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while head.ray("job", "list").returncode != 0:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(1)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End the head in order, and by force what that leaves of it."""
    tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    for left in psutil.wait_procs(tree, timeout=5)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    if process.poll() is None:
        process.kill()
    process.wait(10)


@pytest.fixture
def mark() -> str:
    return uuid.uuid4().hex


def test_a_job_writes_its_files_and_leaves_nothing(head: Head, tmp_path: Path, mark: str) -> None:
    job = f"job-{mark[:8]}"
    log = head.submit(job, mark, "--episodes=4", "--group-size=2", f"--out={tmp_path}")
    assert "SUCCEEDED" in head.status(job), log
    assert sum(pq.read_metadata(file).num_rows for file in tmp_path.glob("*.parquet")) >= 4
    assert wait_gone(mark) == []
    assert [name for name in head.named_actors() if name.startswith(job)] == []


def test_files_that_would_vanish_are_refused(head: Head, mark: str) -> None:
    job = f"lost-{mark[:8]}"
    head.submit(job, mark, "--out=files")
    assert "FAILED" in head.status(job)
    assert (
        "--out files would vanish with this Ray job's copy" in head.ray("job", "logs", job).stdout
    )
    assert marked(mark) == []


def test_a_job_that_is_stopped_leaves_no_engine(head: Head, tmp_path: Path, mark: str) -> None:
    job = f"long-{mark[:8]}"
    sizes = ("--episodes=4000", "--group-size=4", "--concurrency=2")
    head.submit(job, mark, *sizes, f"--out={tmp_path}", wait=False, delay_s=0.3)
    deadline = time.monotonic() + 90
    while "engines ready" not in (log := head.ray("job", "logs", job).stdout):
        assert time.monotonic() < deadline, log
        time.sleep(1)
    assert marked(mark)
    assert "RUNNING" in head.status(job)
    head.ray("job", "stop", job)
    assert wait_gone(mark) == []
    assert "STOPPED" in head.status(job)
    assert [name for name in head.named_actors() if name.startswith(job)] == []
