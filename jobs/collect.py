"""Roll out episodes over a pool and write their trajectories to Parquet files.

``python jobs/collect.py`` asks a small model one-digit sums on the CPU: question, answer, the
verifier's feedback, second try. ``--help`` shows what else it can do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from rollout_workers import PoolConfig, RolloutPool  # first: it sets what Ray reads on import
from rollout_workers.errors import ConfigError, RolloutError

# isort: split
from collector import Collector, Episode, prompt_episodes, task_episodes
from results import Errors, Reporter, Writer, out_dir
from tasks import EASY, Task, read_prompts

DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "pool" / "cpu_demo.yaml"
INTERRUPT = "interrupted"
INTERRUPTED = 130
_PER_WORKER = 64  # episodes under way at once, unless told

_TASK = f"A reasoning-gym data set; easy ones: {', '.join(EASY)}."
_EPISODES = "How many, rounded up to whole groups."
_PROMPTS = "A JSONL file of Responses bodies to answer once each, instead of a task."

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Signals:
    """First SIGINT or SIGTERM: stop in order. Second: leave at once."""

    def __init__(self) -> None:
        self.seen = False
        self.on_stop: Callable[[], object] | None = None

    def install(self) -> None:
        """Take both signals; Ray takes SIGTERM for itself whenever it is joined."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            os._exit(INTERRUPTED)  # the pool's actors end with their driver
        self.seen = True
        if self.on_stop is None:
            raise KeyboardInterrupt
        self.on_stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run is asked to do."""

    episodes: Iterator[Episode]
    total: int
    errors: Errors


def from_task(
    config: PoolConfig, name: str, episodes: int, group_size: int, seed: int, max_turns: int
) -> Work:
    """Whole groups of a task's questions."""
    groups = -(-episodes // group_size)
    if groups * group_size != episodes:
        full = groups * group_size
        _say(f"{episodes} episodes do not fill groups of {group_size}: rolling out {full}")
    task = Task(name, groups, seed)
    prefix = f"{config.run_id}.{name}.s{seed}"
    made = task_episodes(task, prefix, groups, group_size, max_turns)
    return Work(episodes=made, total=groups * group_size, errors=Errors())


def from_prompts(config: PoolConfig, path: Path) -> Work:
    """The good lines of a file; bad ones are told at once."""
    errors, good = Errors(), []
    for prompt in read_prompts(path):
        if prompt.problem is None:
            good.append(prompt)
            continue
        _say(f"line {prompt.line}: {prompt.problem}")
        errors.add("bad_line", f"line {prompt.line}: {prompt.problem}")
    if not good:
        raise ConfigError(f"{path} holds no Responses body: write one JSON object a line")
    episodes = prompt_episodes(good, f"{config.run_id}.prompts")
    return Work(episodes=episodes, total=len(good), errors=errors)


def collect(
    config: PoolConfig, work: Work, writer: Writer, concurrency: int, signals: Signals
) -> int:
    """Start the pool, roll everything out, print the summary, stop the pool."""

    def on_event(event: str) -> None:
        signals.install()
        _say(event)

    with RolloutPool.start(config, on_event=on_event) as pool:
        signals.install()
        with Reporter(work.total) as reporter:
            collector = Collector(pool, writer, reporter, work.errors)
            asyncio.run(_until_done(collector, work.episodes, concurrency, signals))
        print("\n".join(_summary(collector, writer)), flush=True)
    return _verdict(collector, work.total)


async def _until_done(
    collector: Collector, episodes: Iterator[Episode], concurrency: int, signals: Signals
) -> None:
    loop = asyncio.get_running_loop()
    signals.on_stop = lambda: loop.call_soon_threadsafe(collector.stop, INTERRUPT)
    try:
        await collector.run(episodes, concurrency)
    finally:
        signals.on_stop = lambda: None  # closing the pool is what is left to do


def _summary(collector: Collector, writer: Writer) -> list[str]:
    lines = collector.summary.lines(collector.seconds, collector.errors, writer.files)
    return lines + ([f"{'stopped':<12} {collector.stopped}"] if collector.stopped else [])


def _verdict(collector: Collector, total: int) -> int:
    """The exit code, with the reason as the last line of the log."""
    kept = f"{collector.summary.episodes} of {total} episodes written"
    if collector.stopped == INTERRUPT:
        _say(f"interrupted: {kept}")
        return INTERRUPTED
    if collector.stopped is not None:
        _say(f"error: {collector.stopped} ({kept})")
        return 1
    if not collector.succeeded:
        _say(f"error: no episode succeeded: {'; '.join(collector.errors.lines())}")
        return 1
    return 0


@app.command()
def main(
    config: Annotated[
        Path, typer.Option(help="The pool.", show_default="configs/pool/cpu_demo.yaml")
    ] = DEFAULT_CONFIG,
    task: Annotated[str | None, typer.Option(help=_TASK, show_default="chain_sum")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help=_EPISODES, show_default="16")] = None,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Episodes of one question.", show_default="4")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Tries of an episode.", show_default="3")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help=_PROMPTS)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for the files.", show_default="out")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override the config; repeatable."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Episodes under way at once.", show_default=f"{_PER_WORKER} a worker"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the task's questions.")] = 0,
) -> None:
    """Roll out multi-turn episodes over a pool and write trajectories-*.parquet."""
    signals = Signals()
    signals.install()
    try:
        pool = PoolConfig.load(config, set_ or [])
        directory = out_dir(out, os.environ, Path.cwd())
        if prompts is None:
            size = (episodes or 16, group_size or 4)
            work = from_task(pool, task or "chain_sum", *size, seed, max_turns or 3)
        else:
            _check_alone(task=task, episodes=episodes, group_size=group_size, max_turns=max_turns)
            work = from_prompts(pool, prompts)
        lanes = min(work.total, concurrency or _PER_WORKER * pool.workers.count)
        code = collect(pool, work, Writer(directory), lanes, signals)
    except RolloutError as error:
        _say(f"error: {error}")
        code = 1
    except KeyboardInterrupt:
        _say("interrupted before any episode began")
        code = INTERRUPTED
    raise typer.Exit(code)


def _check_alone(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is for tasks and means nothing with --prompts: leave it")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    app()
