"""What a run leaves: Parquet files of rows, a summary, and progress while it goes on."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tasks import SOLVED

from rollout_workers.errors import ConfigError

_JOB_SIGNS = ("RAY_JOB_SUBMISSION_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR")
_JOB_COPY = "runtime_resources/working_dir_files"
_LINE_EVERY_S = 10.0


def out_dir(asked: Path | None, environ: Mapping[str, str], cwd: Path) -> Path:
    """Where files go: ``out`` below ``cwd`` by default; inside a Ray job only where they survive.

    Raises:
        ConfigError: the place would vanish with the job's copy of the working directory.
    """
    in_job = any(environ.get(sign) for sign in _JOB_SIGNS) or _JOB_COPY in str(cwd)
    place = cwd / (asked or "out")
    if in_job and place.resolve().is_relative_to(cwd.resolve()):
        raise ConfigError(
            f"--out {asked or 'out'} would vanish with this Ray job's copy of the working "
            "directory: give an absolute path that outlives the job, such as shared storage",
            "out",
        )
    return place


class Writer:
    """Owns the output files of one run. A file is complete on disk before ``write`` returns."""

    def __init__(self, directory: Path) -> None:
        """Raises ``ConfigError`` if nothing can be written there."""
        stamp = time.strftime("%Y%m%dT%H%M%S")
        self._stem = f"trajectories-{stamp}-{uuid.uuid4().hex[:4]}"
        self._directory = directory
        self._seen: set[tuple[str, int]] = set()
        self.files: list[Path] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._partial.touch()
            self._partial.unlink()
        except OSError as error:
            raise ConfigError(
                f"cannot write to {directory}: {error.strerror}; give another --out", "out"
            ) from None

    @property
    def _partial(self) -> Path:
        return self._directory / f".{self._stem}.partial"

    def write(self, table: pa.Table) -> pa.Table:
        """Write the rows that were not written before, and return them.

        Raises:
            OSError: they could not be written.
        """
        ids = zip(table["trajectory_id"].to_pylist(), table["segment"].to_pylist(), strict=True)
        new = [(at, key) for at, key in enumerate(ids) if key not in self._seen]
        if len(new) < table.num_rows:
            table = table.take(pa.array([at for at, _ in new], pa.int64()))
        if not table.num_rows:
            return table
        path = self._directory / f"{self._stem}-{len(self.files):05d}.parquet"
        with self._partial.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        self._partial.rename(path)
        self._seen.update(key for _, key in new)
        self.files.append(path)
        return table


@dataclass(slots=True)
class Errors:
    """One count per cause, with the first message of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, cause: str, message: str) -> None:
        """Count one failure."""
        self.counts[cause] += 1
        self.first.setdefault(cause, message)

    def lines(self) -> list[str]:
        """``3 x cause: first message``, most frequent first."""
        return [f"{n} x {cause}: {self.first[cause]}" for cause, n in self.counts.most_common()]


@dataclass(slots=True)
class Summary:
    """Totals over the rows that were written."""

    episodes: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    rewards: list[float] = field(default_factory=list)
    solved_at: Counter[int] = field(default_factory=Counter)
    most_turns: int = 1
    finish_reasons: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table) -> None:
        """Count the rows of one table; what segments share is counted once."""
        turns: dict[str, dict[str, Any]] = {}
        for row in table.select(
            ["segment", "turns", "reward", "turn_rewards", "status"]
        ).to_pylist():
            turns |= {turn["response_id"]: turn for turn in row["turns"]}
            if row["segment"] == 0:
                self._add_episode(row)
        self._add_turns(turns.values())

    def _add_turns(self, turns: Collection[dict[str, Any]]) -> None:
        self.turns += len(turns)
        for turn in turns:
            self.prompt_tokens += turn["start"]
            self.cached_tokens += turn["cached_tokens"]
            self.generated_tokens += turn["end"] - turn["start"]
            self.finish_reasons[turn["finish_reason"]] += 1

    def _add_episode(self, row: dict[str, Any]) -> None:
        self.episodes += 1
        self.statuses[row["status"]] += 1
        if row["reward"] is not None:
            self.rewards.append(row["reward"])
        rewards = row["turn_rewards"] or []
        self.most_turns = max(self.most_turns, len(rewards))
        first = next((i for i, r in enumerate(rewards, start=1) if r >= SOLVED), None)
        if first is not None:
            self.solved_at[first] += 1

    def lines(self, seconds: float, errors: Errors, files: list[Path]) -> list[str]:
        """The summary for people, one fact a line."""
        facts = {
            "episodes": f"{self.episodes} ({_counts(self.statuses)})",
            "turns": f"{self.turns} ({_counts(self.finish_reasons)})",
            "tokens": f"{self.prompt_tokens} prompt, {self.generated_tokens} generated",
            "speed": f"{self.generated_tokens / max(seconds, 1e-9):.1f} tok/s over {seconds:.1f} s",
            "cached": f"{_share(self.cached_tokens, self.prompt_tokens)} of prompt tokens",
            "mean reward": self._mean_reward(),
            "solved": self._solved(),
        }
        lines = [f"{name:<12} {fact}" for name, fact in facts.items()]
        lines += [f"{'errors':<12} {line}" for line in errors.lines() or ["none"]]
        return lines + [f"{'written':<12} {file}" for file in files or ["nothing"]]

    def _mean_reward(self) -> str:
        if not self.rewards:
            return "none given"
        return f"{sum(self.rewards) / len(self.rewards):.3f} over {len(self.rewards)}"

    def _solved(self) -> str:
        if not self.rewards:
            return "not checked"
        shares, total = [], 0
        for turn in range(1, self.most_turns + 1):
            total += self.solved_at[turn]
            shares.append(f"{_share(total, len(self.rewards))} by turn {turn}")
        return ", ".join(shares)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counter.most_common()) or "none"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


class Reporter:
    """Tells how far a run is: a bar on a terminal, a line now and then in a log."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._told = total, 0, time.monotonic()
        self._console = Console(file=sys.stderr, soft_wrap=True, markup=False, highlight=False)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, TimeElapsedColumn(), console=self._console)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Reporter:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(line)

    def advance(self, about: str) -> None:
        """One more episode has ended."""
        self._done += 1
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._done, description=about)
        elif self._done == self._total or time.monotonic() - self._told >= _LINE_EVERY_S:
            self._told = time.monotonic()
            self.say(f"{self._done}/{self._total} episodes, {about}")
