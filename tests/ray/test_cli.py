"""The command line as an operator uses it, each command a process of its own."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import httpx
import pytest
import yaml
from pools import ended, rays_of, scripted, still_there, wait_gone

from rollout_workers.cli import _say_stopped
from rollout_workers.errors import RolloutError

pytestmark = pytest.mark.ray
COMMAND = [sys.executable, "-m", "rollout_workers"]


def run(*arguments: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout)


def test_serve_status_and_stop(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    name = f"cli-{mark[:8]}"
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(scripted("demo:tiny", name="renamed", mark=mark)))
    serve = subprocess.Popen(
        [*COMMAND, "serve", str(file), "--set", f"name={name}", "--set", "workers.count=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with ended(serve):
        assert serve.stdout
        line = serve.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:"), serve.communicate()[1]
        url = line.removeprefix("ready: ").strip()
        reply = httpx.post(f"{url}/responses", json={"input": "hi", "max_output_tokens": 2})
        assert reply.json()["usage"]["output_tokens"] == 2
        shown = run("status", name)
        assert shown.returncode == 0 and "serving" in shown.stdout and url in shown.stdout
        found = json.loads(run("status", name, "--json").stdout)
        assert [w["state"] for w in found["workers"]] == ["serving"]
        stopped = run("stop", name)
        assert stopped.returncode == 0, stopped.stderr
        assert serve.wait(30) == 0
        assert wait_gone(mark) == []
    gone = run("status", name)
    assert gone.returncode == 1 and "rollout-workers serve" in gone.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_on_a_signal_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    mark = uuid.uuid4().hex
    file = tmp_path / "pool.yaml"
    config = scripted("demo:tiny", name=f"sig-{mark[:8]}", mark=mark, workers=1)
    file.write_text(yaml.safe_dump(config))
    serve = subprocess.Popen(
        [*COMMAND, "serve", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ended(serve):
        assert serve.stdout and serve.stdout.readline().startswith("ready: ")
        directories, processes = rays_of(serve.pid)
        assert len(directories) == 1
        serve.send_signal(number)
        assert serve.wait(40) == 0
        assert wait_gone(mark) == []
        assert still_there(processes) == set()
        assert not any(directory.exists() for directory in directories)


KILL_CONTROLLER = """
import sys, ray
from rollout_workers import cluster
cluster.reach(sys.argv[1])
ray.kill(ray.get_actor(sys.argv[1] + ".controller", namespace=cluster.NAMESPACE))
"""


def test_serve_tells_a_lost_controller_and_ends_what_is_left(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    name = f"lost-{mark[:8]}"
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(scripted("demo:tiny", name=name, mark=mark, workers=1)))
    serve = subprocess.Popen(
        [*COMMAND, "serve", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with ended(serve):
        assert serve.stdout and serve.stdout.readline().startswith("ready: ")
        subprocess.run([sys.executable, "-c", KILL_CONTROLLER, name], check=True, timeout=60)
        _, said = serve.communicate(timeout=60)
        assert serve.returncode == 1
        assert f"error: the controller of pool '{name}' was lost" in said
        assert f"ended without their controller: {name}.buffer" in said
        assert "Traceback" not in said and wait_gone(mark) == []


def test_a_taken_port_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump(scripted("demo:tiny", name="taken", workers=1)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", str(file), "--set", f"router.http.port={port}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"error: router.http.port {port} is taken on 127.0.0.1: choose" in done.stderr


def test_a_pool_that_did_not_stop_is_not_called_stopped(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(RolloutError, match=r"'p' is not stopped, p\.worker\.0 still run"):
        _say_stopped("p", {"cleared": ["p.worker.0"], "left": ["p.worker.0"]})
    assert capsys.readouterr().err == "ended without their controller: p.worker.0\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("engine: {modle: x}", "did you mean model?"),
        ("workers: {count: 0}", "workers.count"),
        ("- 1", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_a_wrong_config_is_one_line_and_nothing_starts(
    tmp_path: Path, content: str, says: str
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(content)
    done = run("serve", str(file))
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr


def test_a_missing_config_and_a_missing_model_say_what_to_do(tmp_path: Path) -> None:
    absent = run("serve", str(tmp_path / "none.yaml"))
    assert absent.returncode == 1 and "configs/pool" in absent.stderr
    file = tmp_path / "pool.yaml"
    file.write_text("engine: {model: demo:smolm2, device: cpu}")
    unknown = run("serve", str(file))
    assert unknown.returncode == 1 and "demo:smollm2" in unknown.stderr
