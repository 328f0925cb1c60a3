"""The main job as a person runs it: a subprocess, the real engine, files on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pools import ended, wait_gone
from transformers import AutoTokenizer

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.filterwarnings("default"),  # of transformers, not of ours
]

COLLECT = Path(__file__).parents[2] / "jobs" / "collect.py"
Json = dict[str, Any]


@pytest.fixture
def mark() -> Iterator[str]:
    """In the environment of the job and of all that it begins; none of it may be left."""
    mark = uuid.uuid4().hex
    yield mark
    assert wait_gone(mark) == []


def start(mark: str, out: Path, *options: str) -> subprocess.Popen[str]:
    """The job with the tiny model, in a process group of its own as a shell would have it."""
    sets = {
        "name": f"collect-{mark[:8]}",
        "engine.model": "demo:tiny",
        "engine.dtype": "float32",
        "ray.num_cpus": "2",
        "sampling.max_output_tokens": "12",
    }
    command = [sys.executable, str(COLLECT), "--out", str(out), *options]
    for key, value in sets.items():
        command += ["--set", f"{key}={value}"]
    environ = {**os.environ, "RW_TEST_MARK": mark}
    environ.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        command,
        cwd=out.parent,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def read(out: Path) -> list[Json]:
    assert [file for file in out.iterdir() if file.suffix != ".parquet"] == []
    tables = [pq.read_table(file) for file in sorted(out.glob("trajectories-*.parquet"))]
    return pa.concat_tables(tables).to_pylist() if tables else []


def check_row(row: Json) -> None:
    total = len(row["token_ids"])
    assert len(row["loss_mask"]) == len(row["logprobs"]) == total
    generated = {i for turn in row["turns"] for i in range(turn["start"], turn["end"])}
    assert {i for i, trained in enumerate(row["loss_mask"]) if trained} == generated
    assert all(row["logprobs"][i] < 0 for i in generated)
    assert all(row["logprobs"][i] == 0 for i in range(total) if i not in generated)
    assert [turn["start"] for turn in row["turns"]][:1] == [row["prompt_length"]]
    assert (row["segment"], row["num_segments"], row["segment_reason"]) == (0, 1, "start")


def test_a_task_leaves_whole_groups_of_exact_rows(mark: str, tmp_path: Path, tiny: Path) -> None:
    options = ["--episodes", "6", "--group-size", "3", "--max-turns", "2", "--seed", "5"]
    with ended(start(mark, tmp_path / "out", *options)) as job:
        summary, log = job.communicate(timeout=600)
    assert job.returncode == 0, log
    rows = read(tmp_path / "out")
    for row in rows:
        check_row(row)
    assert len({row["trajectory_id"] for row in rows}) == len(rows) == 6
    prefix = "run.chain_sum.s5"
    assert Counter(row["group_id"] for row in rows) == {f"{prefix}.g0": 3, f"{prefix}.g1": 3}
    assert {row["group_size"] for row in rows} == {3}
    expected = {f"{prefix}.g{group}.{sample}" for group in (0, 1) for sample in (0, 1, 2)}
    assert {row["session_id"] for row in rows} == expected
    assert "episodes     6 (" in summary and "errors       none" in summary
    assert "6/6 episodes" in log
    check_second_turns(rows, tiny)


def check_second_turns(rows: list[Json], model: Path) -> None:
    """Turn 2's prompt is turn 1's, then the sampled ids, then the feedback."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    longer = [row for row in rows if len(row["turns"]) == 2]
    assert longer, "random weights solved everything at once"
    for row in longer:
        items = json.loads(row["items"])
        assert [item["role"] for item in items] == ["user", "assistant"] * 2
        first, second = row["turns"]
        question = tokenizer.decode(row["token_ids"][: first["start"]])
        assert items[0]["content"] in question
        between = tokenizer.decode(row["token_ids"][first["end"] : second["start"]])
        assert items[2]["content"] in between
        assert row["token_ids"][second["end"] :] == []
        assert row["turn_rewards"][-1] == row["reward"]
        assert json.loads(row["metadata"])["task"] == "chain_sum"


def test_bad_prompts_are_told_and_the_others_go_on(mark: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        json.dumps({"input": "hello", "temperature": 0.5}),
        "{oops",
        json.dumps({"input": [{"role": "robot", "content": "x"}]}),
        json.dumps({"input": "x " * 9000}),
        json.dumps({"input": "hello again", "max_output_tokens": 3, "ignore_eos": True}),
    ]
    prompts.write_text("\n".join(lines))
    with ended(start(mark, tmp_path / "out", "--prompts", str(prompts))) as job:
        summary, log = job.communicate(timeout=600)
    assert job.returncode == 0, log
    assert "line 2: not JSON" in log
    assert "line 3: refused: input[0].role must be one of" in log
    assert "line 4: refused: the prompt has" in log
    rows = {json.loads(row["metadata"])["line"]: row for row in read(tmp_path / "out")}
    assert sorted(rows) == [1, 5]
    for row in rows.values():
        check_row(row)
        assert (row["group_id"], row["reward"], row["error"]) == (None, None, None)
    assert rows[1]["turns"][0]["temperature"] == 0.5
    assert sum(rows[5]["loss_mask"]) == 3
    assert rows[5]["status"] == "length"
    assert "errors       1 x " in summary


def test_interrupt_keeps_what_is_finished(mark: str, tmp_path: Path) -> None:
    options = ["--episodes", "100000", "--concurrency", "4", "--max-turns", "1"]
    with ended(start(mark, tmp_path / "out", *options)) as job:
        assert job.stderr is not None
        seen = next(line for line in job.stderr if "/100000 episodes" in line)
        os.killpg(job.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the whole group
        summary, log = job.communicate(timeout=60)
    assert job.returncode == 130, log
    rows = read(tmp_path / "out")
    for row in rows:
        check_row(row)
    assert len(rows) >= int(seen.split("/")[0])
    assert f"episodes     {len(rows)} (" in summary
    assert summary.splitlines()[-1] == "stopped      interrupted"
    assert log.splitlines()[-1] == f"interrupted: {len(rows)} of 100000 episodes written"
    assert {row["status"] for row in rows} <= {"completed", "length"}
