from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from results import Errors, Summary, Writer, out_dir
from tasks import EASY, Prompt, Question, Task, answer, read_prompts, reading, solve

from rollout_workers.errors import BadRequest, ConfigError, ContextOverflow

Json = dict[str, Any]


class Policy:
    """Answers with the given texts, one a call; an exception among them is raised."""

    def __init__(self, *replies: str | Exception) -> None:
        self.replies = list(replies)
        self.bodies: list[Json] = []

    async def __call__(self, body: Json) -> Json:
        self.bodies.append(body)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        part = {"type": "output_text", "text": reply}
        return {"output": [{"type": "message", "role": "assistant", "content": [part]}]}


@pytest.fixture(scope="module")
def sums() -> Task:
    return Task("chain_sum", 4)


def wrong(question: Question) -> str:
    return str(int(question.entry["answer"]) + 1)


def test_task_is_the_same_for_the_same_seed(sums: Task) -> None:
    again, other = Task("chain_sum", 4, seed=0), Task("chain_sum", 4, seed=1)
    texts = [[task[i].text for i in range(4)] for task in (sums, again, other)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("name", [*EASY, "spell_backward"])
def test_task_scores_its_own_answer(name: str) -> None:
    task = Task(name, 3)
    for question in (task[i] for i in range(3)):
        assert task.score(f"<answer>{question.entry['answer']}</answer>", question) == 1.0
        assert task.score("", question) == 0.0


def test_unknown_task_names_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"no task 'chainsum'.*did you mean chain_sum"):
        Task("chainsum", 1)
    with pytest.raises(ConfigError, match=r"no task 'zzz'.*try chain_sum, products"):
        Task("zzz", 1)


def test_task_with_impossible_options_says_why() -> None:
    with pytest.raises(ConfigError, match=r"task 'chain_sum' cannot be made: .*max_terms"):
        Task("chain_sum", 1, min_terms=5)


@pytest.mark.parametrize(
    ("expected", "text", "found"),
    [
        ("3", "4 - 1 = 3.", "3"),
        ("-4", "5-9=-4", "-4"),
        ("1", "9-8", "8"),
        ("2.5", "It is 2.5 or so", "2.5"),
        ("3", "<answer> 3 </answer> or <answer>\n4\n</answer> 5", "4"),
        ("3", "no number", None),
        ("True", "I think.\n it is 2 \n", "it is 2"),
        ("True", " \n", None),
        ("1 2\n3 4", "Here:\n4 3\n2 1\n", "4 3\n2 1"),
        (None, "Up\nDown", "Up\nDown"),
    ],
)
def test_reading(expected: str | None, text: str, found: str | None) -> None:
    assert reading(text, expected) == found


def test_score_takes_the_number_out_of_a_sentence(sums: Task) -> None:
    question = sums[0]
    right = question.entry["answer"]
    assert sums.score(f"The answer is {right}.", question) == 1.0
    assert sums.score(f"The answer is {right}7.", question) == 0.0
    assert sums.score(f"{right}? No, {wrong(question)}!", question) == 0.0


def test_feedback_tells_the_reading_and_not_the_answer(sums: Task) -> None:
    assert sums.feedback("4 - 1 = 8.", sums[0]).startswith("8 is not correct.")
    assert sums.feedback("", sums[0]).startswith("I cannot find an answer")
    assert len(sums.feedback("1" * 10_000, sums[0])) < 200


async def test_solve_asks_again_with_the_whole_history(sums: Task) -> None:
    question = sums[1]
    right = question.entry["answer"]
    policy = Policy(wrong(question), f"It is {right}.", "never asked")
    outcome = await solve(sums, question, policy, max_turns=3)
    assert (outcome.reward, outcome.turn_rewards) == (1.0, [0.0, 1.0])
    assert outcome.status is None
    assert outcome.metadata == {"task": "chain_sum", "answer": right}
    first, second = (body["input"] for body in policy.bodies)
    assert first == [{"role": "user", "content": question.text}]
    assert second[:1] == first
    assert [item["role"] for item in second] == ["user", "assistant", "user"]
    assert "not correct" in second[2]["content"]


async def test_solve_gives_up_after_max_turns(sums: Task) -> None:
    policy = Policy(*[wrong(sums[2])] * 5)
    outcome = await solve(sums, sums[2], policy, max_turns=3)
    assert len(policy.bodies) == 3
    assert outcome.turn_rewards == [0.0, 0.0, 0.0]


async def test_solve_ends_when_the_context_is_full(sums: Task) -> None:
    policy = Policy(wrong(sums[0]), ContextOverflow("too long", "input"))
    outcome = await solve(sums, sums[0], policy, max_turns=3)
    assert (outcome.status, outcome.turn_rewards) == ("length", [0.0])
    with pytest.raises(ContextOverflow):  # nothing was generated: that is a failure
        await solve(sums, sums[0], Policy(ContextOverflow("too long")), max_turns=3)


def test_read_prompts_tells_bad_lines_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        b'\xef\xbb\xbf{"input": "a"}',
        b"",
        b"{oops",
        b'["input"]',
        b'{"input": "\xff"}',
        b"[" * 100_000,
        b'{"input": "b"}',
    ]
    path.write_bytes(b"\n".join(lines))
    prompts = list(read_prompts(path))
    assert [(p.line, p.body) for p in prompts if p.problem is None] == [
        (1, {"input": "a"}),
        (7, {"input": "b"}),
    ]
    problems = {p.line: p.problem for p in prompts if p.problem}
    assert problems[3].startswith("not JSON: ")
    assert problems[4] == "not a JSON object but list"
    assert problems[5] == "not UTF-8: invalid start byte at byte 11"
    assert problems[6].startswith("not JSON")
    assert len(problems) == 4


async def test_answer_sends_the_body_as_it_is() -> None:
    policy = Policy("yes")
    outcome = await answer(Prompt(3, {"input": "hi", "top_p": 0.5}), policy)
    assert policy.bodies == [{"input": "hi", "top_p": 0.5}]
    assert (outcome.reward, outcome.metadata) == (None, {"line": 3})
    with pytest.raises(BadRequest):
        await answer(Prompt(1, {}), Policy(BadRequest("missing", "input")))


def test_out_dir_outside_a_job(tmp_path: Path) -> None:
    assert out_dir(None, {}, tmp_path) == tmp_path / "out"
    assert out_dir(Path("a/b"), {}, tmp_path) == tmp_path / "a/b"
    assert out_dir(Path("/data"), {}, tmp_path) == Path("/data")


@pytest.mark.parametrize("sign", ["RAY_JOB_SUBMISSION_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR"])
def test_out_dir_inside_a_job_must_outlive_it(sign: str, tmp_path: Path) -> None:
    environ = {sign: "x"}
    for asked in (None, Path("out"), tmp_path / "out"):
        with pytest.raises(ConfigError, match="give an absolute path"):
            out_dir(asked, environ, tmp_path)
    assert out_dir(Path("/data/run"), environ, tmp_path) == Path("/data/run")


def test_out_dir_knows_the_jobs_copy_by_its_path() -> None:
    copy = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")
    with pytest.raises(ConfigError, match="working directory"):
        out_dir(None, {}, copy)


def rows(*ids: str) -> pa.Table:
    return pa.table(
        {
            "trajectory_id": list(ids),
            "segment": pa.array([0] * len(ids), pa.int32()),
            "turns": [turns(name) for name in ids],
            "reward": pa.array([1.0] * len(ids), pa.float64()),
            "turn_rewards": [[0.0, 1.0] for _ in ids],
            "status": ["completed"] * len(ids),
        }
    )


def turns(name: str) -> list[dict[str, Any]]:
    shared = {"cached_tokens": 1}
    return [
        {"response_id": f"{name}1", "start": 3, "end": 5, "finish_reason": "stop", **shared},
        {"response_id": f"{name}2", "start": 8, "end": 9, "finish_reason": "length", **shared},
    ]


def test_a_turn_that_two_segments_share_is_counted_once() -> None:
    table = rows("a", "a").set_column(1, "segment", pa.array([0, 1], pa.int32()))
    summary = Summary()
    summary.add(table)
    assert (summary.episodes, summary.turns, summary.generated_tokens) == (1, 2, 3)


def test_writer_drops_doubles_and_leaves_whole_files(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "new")
    assert writer.write(rows("a", "b")).num_rows == 2
    assert writer.write(rows("b", "c"))["trajectory_id"].to_pylist() == ["c"]
    assert writer.write(rows("a")).num_rows == 0
    assert sorted(writer.files) == sorted((tmp_path / "new").iterdir())
    assert [pq.read_table(file).num_rows for file in writer.files] == [2, 1]
    assert all(file.match("trajectories-*.parquet") for file in writer.files)


def test_writer_says_where_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to .*file/out: .*; give another --out"):
        Writer(tmp_path / "file" / "out")


def test_summary_counts_what_was_written() -> None:
    summary, errors = Summary(), Errors()
    summary.add(rows("a", "b"))
    errors.add("worker_lost", "first")
    errors.add("worker_lost", "second")
    lines = summary.lines(2.0, errors, [Path("x.parquet")])
    told = dict(line.split(maxsplit=1) for line in lines if not line.startswith("mean"))
    assert told == {
        "episodes": "2 (2 completed)",
        "turns": "4 (2 stop, 2 length)",
        "tokens": "22 prompt, 6 generated",
        "speed": "3.0 tok/s over 2.0 s",
        "cached": "18.2% of prompt tokens",
        "solved": "0.0% by turn 1, 100.0% by turn 2",
        "errors": "2 x worker_lost: first",
        "written": "x.parquet",
    }
    assert "mean reward  1.000 over 2" in lines


def test_summary_of_nothing() -> None:
    lines = Summary().lines(0.0, Errors(), [])
    assert "solved       not checked" in lines
    assert "written      nothing" in lines
