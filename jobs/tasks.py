"""Tasks to roll out: questions of `reasoning-gym` with their verifiers, and prompts from a file.

An *agent* here is one coroutine that calls the policy through ``respond`` and returns an
``Outcome``. It knows nothing of pools, sessions or Ray.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_workers.errors import ConfigError, ContextOverflow

Json = dict[str, Any]
Respond = Callable[[Json], Awaitable[Json]]
SOLVED = 0.99  # some verifiers count in floats

# Sizes at which a model of 135M parameters is right now and then; others run with their defaults.
EASY: dict[str, Json] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 10},
    "leg_counting": {"min_animals": 1, "max_animals": 1, "max_instances": 3},
    "letter_counting": {"min_words": 3, "max_words": 3},
}
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_TAGGED = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended. ``status`` None leaves it to the pool: completed or length."""

    reward: float | None = None
    turn_rewards: list[float] | None = None
    status: str | None = None
    metadata: Json = field(default_factory=dict)


Agent = Callable[[Respond], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Question:
    """One entry of a data set: what is asked, and what the verifier needs."""

    text: str
    entry: Mapping[str, Any]

    @property
    def answer(self) -> str | None:
        """The right answer; None where the data set has a verifier only."""
        answer = self.entry["answer"]
        return None if answer is None else str(answer)


class Task:
    """A `reasoning-gym` data set: ``task[i]`` is a question, ``score`` its verifier."""

    def __init__(self, name: str, size: int, seed: int = 0, **options: Any) -> None:
        """Make ``size`` questions; the same seed gives the same ones.

        Raises:
            ConfigError: no such data set, or it cannot be made with these options.
        """
        known = _datasets()
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"try {', '.join(EASY)}"
            raise ConfigError(
                f"no task {name!r} among the {len(known)} of reasoning-gym: {hint}", "task"
            )
        self.name = name
        try:
            self._data = _create(name, {**EASY.get(name, {}), **options}, size, seed)
        except Exception as error:  # whatever the data set's own checks raise
            raise ConfigError(f"task {name!r} cannot be made: {error}", "task") from None

    def __getitem__(self, index: int) -> Question:
        entry = self._data[index]
        return Question(entry["question"], entry)

    def score(self, text: str, question: Question) -> float:
        """Reward of a reply, 0 to 1."""
        answer = reading(text, question.answer)
        if answer is None:
            return 0.0
        try:
            score = float(self._data.score_answer(answer, question.entry))
        except Exception:  # a verifier that trips over a malformed answer has judged it
            return 0.0
        # The usual verifier pays for containing the answer: 14 would earn half of what 4 does.
        return score if score >= SOLVED or not _is_number(question.answer) else 0.0

    def feedback(self, text: str, question: Question) -> str:
        """What the verifier says of a wrong reply. It never tells the answer."""
        answer = reading(text, question.answer)
        if answer is None:
            return "I cannot find an answer in that. Try again and give only the answer."
        return f"{answer:.80} is not correct. Try again and give only the answer."


def reading(text: str, expected: str | None) -> str | None:
    """What a reply says is the answer: what is tagged, else its end in the expected form.

    That is the last number where a number is expected, else as many last lines as are expected,
    else, where many answers are right and none is expected, all of it.
    """
    if tagged := _TAGGED.findall(text):
        return tagged[-1]
    if _is_number(expected):
        return next(reversed(_NUMBER.findall(text)), None)
    lines = text.strip().splitlines()
    if expected is not None:
        lines = lines[-max(1, len(expected.splitlines())) :]
    return "\n".join(lines).strip() or None


def _is_number(expected: str | None) -> bool:
    return expected is not None and _NUMBER.fullmatch(expected) is not None


async def solve(task: Task, question: Question, respond: Respond, max_turns: int) -> Outcome:
    """Ask, check, give feedback, ask again: up to ``max_turns`` turns or until solved."""
    messages: list[Json] = [{"role": "user", "content": question.text}]
    scores: list[float] = []
    status = None
    while True:
        try:
            reply = await respond({"input": messages})
        except ContextOverflow:
            if not scores:
                raise
            status = "length"  # the conversation grew too long: an outcome, not a failure
            break
        text = output_text(reply)
        scores.append(task.score(text, question))
        if scores[-1] >= SOLVED or len(scores) == max_turns:
            break
        messages = [
            *messages,
            *reply["output"],
            {"role": "user", "content": task.feedback(text, question)},
        ]
    about = {"task": task.name, "answer": question.answer}
    return Outcome(reward=scores[-1], turn_rewards=scores, status=status, metadata=about)


def output_text(reply: Json) -> str:
    """The text of a Response object."""
    parts = (part for item in reply["output"] for part in item.get("content") or [])
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompts file: a Responses body, or why it is none."""

    line: int
    body: Json | None
    problem: str | None = None


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Read a JSONL file of Responses bodies; empty lines are skipped, bad ones are told."""
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if raw.strip():
                yield _prompt(number, raw)


def _prompt(number: int, raw: bytes) -> Prompt:
    try:
        body = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Prompt(number, None, f"not UTF-8: {error.reason} at byte {error.start}")
    except json.JSONDecodeError as error:
        return Prompt(number, None, f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Prompt(number, None, f"not JSON that can be read: {error}")
    if not isinstance(body, dict):
        return Prompt(number, None, f"not a JSON object but {type(body).__name__}")
    return Prompt(number, body)


async def answer(prompt: Prompt, respond: Respond) -> Outcome:
    """Ask once; there is nothing to check against."""
    await respond(prompt.body or {})
    return Outcome(metadata={"line": prompt.line})


def _datasets() -> Mapping[str, Any]:
    try:
        with warnings.catch_warnings():  # a dependency's sources warn when first compiled
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"tasks need the package {error.name}: install rollout_workers[demo]", "task"
        ) from None
    return DATASETS


def _create(name: str, options: Json, size: int, seed: int) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(name, size=size, seed=seed, **options)
