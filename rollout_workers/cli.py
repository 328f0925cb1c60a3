"""The command line: ``serve``, ``status``, ``stop``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rollout_workers.config import PoolConfig
from rollout_workers.errors import RolloutError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override.")]
Address = Annotated[str | None, typer.Option(help="Ray cluster; default RAY_ADDRESS or this one.")]


@app.command()
def serve(
    config: Annotated[Path, typer.Argument(help="A YAML file such as those in configs/pool.")],
    set_: Sets = None,
) -> None:
    """Start a pool and serve it until SIGINT or SIGTERM."""
    from rollout_workers.pool import RolloutPool

    loaded = PoolConfig.load(config, set_ or [])
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():  # asked twice: leave now, the pool's actors see to themselves
            os._exit(128 + number)
        stop.set()
        raise KeyboardInterrupt

    def listen(event: str) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)  # again at each step: ray.init puts its own in place
        _say(event)

    try:
        pool = RolloutPool.start(loaded, on_event=listen)
    except KeyboardInterrupt:
        return _say("stopped before it was ready")
    try:
        print(f"ready: {pool.url}" if pool.url else "ready", flush=True)
        pool.wait()
    except KeyboardInterrupt:
        pass
    except RolloutError:  # what is left of it ends here, too
        _say_stopped(pool.name, pool.close())
        raise
    _say_stopped(pool.name, pool.close())


@app.command()
def status(
    name: Annotated[str, typer.Argument(help="The pool's name.")] = "policy",
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, for programs.")] = False,
) -> None:
    """Show a pool: each worker's state, load, version, address and age."""
    import ray

    from rollout_workers.pool import RolloutPool

    found = ray.get(RolloutPool.connect(name, address).status())
    if as_json:
        print(json.dumps(found, default=str))
    else:
        _show(found)


@app.command()
def stop(
    name: Annotated[str, typer.Argument(help="The pool's name.")], address: Address = None
) -> None:
    """Stop a pool, wherever it was started from, and wait until its engines are gone."""
    from rollout_workers.pool import RolloutPool

    _say_stopped(name, RolloutPool.end(name, address))


def _show(found: dict[str, Any]) -> None:
    console = Console()
    age = f"up {found['uptime_s']:.0f} s, weights {found['version']}"
    console.print(f"pool [bold]{found['name']}[/]  {found['model']}  {age}")
    table = Table("worker", "state", "for", "requests", "tokens", "sessions", "version")
    table.add_column("address or reason", overflow="fold")
    for worker in found["workers"]:
        load = worker["load"]
        counts = [str(load.get(key, "-")) for key in ("requests", "tokens", "sessions")]
        where = worker.get("url") or worker["reason"]
        version = str(worker.get("version", "-"))
        since = f"{worker['since_s']:.0f} s"
        short = worker["name"].removeprefix(f"{found['name']}.worker.")
        table.add_row(short, worker["state"], since, *counts, version, where)
    console.print(table)
    for router in found["routers"]:
        front = router.get("url") or "no HTTP"
        console.print(f"router {router.get('shard', '?')}  {front}  {_counts(router)}")
    buffer = found["buffer"]
    console.print(
        f"buffer  waiting {buffer.get('waiting', '?')}, leased {buffer.get('leased', '?')}, "
        f"acknowledged {buffer.get('acked', '?')} trajectories"
    )


def _counts(router: dict[str, Any]) -> str:
    counts = {"sessions": router.get("sessions", 0), **router.get("counts", {})}
    return router.get("error") or ", ".join(f"{key} {value}" for key, value in counts.items())


def _say_stopped(name: str, word: dict[str, Any]) -> None:
    if word.get("cleared"):
        _say(f"ended without their controller: {', '.join(word['cleared'])}")
    if word.get("left"):
        left = ", ".join(word["left"])
        raise RolloutError(f"pool {name!r} is not stopped, {left} still run: try again")
    _say("stopped")
    if word.get("unread"):
        _say(f"{word['unread']} trajectories were never acknowledged; they are in {word['spool']}")


def _say(event: str) -> None:
    print(event, file=sys.stderr, flush=True)


def main() -> None:
    """Entry point: errors of ours are one line and exit code 1, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        app()
    except RolloutError as error:
        _say(f"error: {error.message}")  # its str is the whole remote traceback
        sys.exit(1)
