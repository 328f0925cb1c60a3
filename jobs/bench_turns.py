"""What a turn costs in the pool: CPU time, latency, throughput, parsing, the way to the trainer.

``python jobs/bench_turns.py`` measures every part side by side in interleaved rounds; ``--quick``
takes less than a minute and leaves out the real engine. The engine is the instant scripted one of
the tests unless a figure says otherwise.
"""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from bench_pool import ACTORS, Bench, kind, proxy, running, scripted, stock  # before Ray

# isort: split
from bench_common import Account, Figure, Report, children, ratios
from bench_load import Order
from bench_rows import hand_off, parsing

_LANES, _TOKENS = 64, 512
_SHORT = 16  # tokens of a reply where latency is measured

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Part(StrEnum):
    """What can be measured by itself."""

    CPU = "cpu"
    LATENCY = "latency"
    HAND_OFF = "hand-off"
    PARSE = "parse"
    REAL = "real"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured."""

    rounds: int
    turns: int  # of each arm in each round
    requests: int  # of each arm in each round where they go one at a time


_FULL = Scale(rounds=9, turns=1024, requests=200)
_QUICK = Scale(rounds=5, turns=256, requests=60)


def turn_cpu(run: Bench, scale: Scale) -> list[Figure]:
    """CPU time per turn of the pool's processes, over HTTP and through the handle."""

    def order(kind: str, turns: int = 1, **fields: Any) -> Order:
        sessions = max(_LANES, scale.turns // turns)
        shape = {"sessions": sessions, "turns": turns, "lanes": _LANES, "tokens": _TOKENS}
        return run.order(kind, **(shape | fields))

    with proxy(run.worker.url) as (address, pid):
        arms = {
            "direct": order("direct"),
            "proxy": order("generate", target=address),
            "HTTP, 1-turn sessions": order("responses"),
            "HTTP, 4-turn sessions": order("responses", 4),
            "HTTP, 4-turn sessions, token ids on replies": order("responses", 4, token_ids=True),
            "handle, 1-turn sessions": order("handle"),
            "handle, 4-turn sessions": order("handle", 4),
        }
        for arm in arms.values():  # warms up
            run.load.run(_fresh(arm))
        account = Account(children(kind) | {"proxy": [pid]})
        rounds = [
            {name: _spend(run, account, arm) for name, arm in arms.items()}
            for _ in range(scale.rounds)
        ]
    return _cpu_figures(rounds)


def _fresh(order: Order) -> Order:
    """The order with session ids that no other had; the prompts stay the same."""
    if order.kind in ("responses", "handle"):
        return msgspec.structs.replace(order, names=uuid.uuid4().hex[:8])
    return order


def _spend(run: Bench, account: Account, order: Order) -> dict[str, float]:
    """Microseconds per turn by kind of process, and turns per second."""
    account.spent()
    result = run.load.run(_fresh(order))
    spent = {kind: s / result.turns * 1e6 for kind, s in account.spent().items()}
    run.drain()
    return spent | {
        "pool": sum(spent.get(kind, 0.0) for kind in ACTORS),
        "client": result.cpu_s / result.turns * 1e6,
        "rate": result.turns / result.seconds,
    }


def _cpu_figures(rounds: list[dict[str, dict[str, float]]]) -> list[Figure]:
    def column(arm: str, kind: str, scale: float = 1.0) -> list[float]:
        return [spent[arm].get(kind, 0.0) * scale for spent in rounds]

    figures = [
        Figure(name="direct aiohttp client, own CPU", unit="us", rounds=column("direct", "client")),
        Figure(name="bare aiohttp proxy, own CPU", unit="us", rounds=column("proxy", "proxy")),
    ]
    for arm in rounds[0]:
        if arm in ("direct", "proxy"):
            continue
        must, stretch = (1.5, 0.8) if arm.startswith("HTTP") else (2.0, 1.2)
        goal: dict[str, float] = {} if "token ids" in arm else {"must": must, "stretch": stretch}
        pool = column(arm, "pool")
        parts = {k: column(arm, k) for k in (*ACTORS, "Ray", "client") if k in rounds[0][arm]}
        inside = ", ".join(f"{k} {statistics.median(v):.0f}" for k, v in parts.items())
        figures += [
            Figure(
                name=f"pool CPU per turn, {arm}",
                unit="ms",
                rounds=[us / 1e3 for us in pool],
                detail=f"us: {inside}",
                **goal,
            ),
            Figure(
                name="  … turns a second / direct client",
                unit="x",
                rounds=ratios(column(arm, "rate"), column("direct", "rate")),
            ),
        ]
    return figures


def latency(run: Bench, scale: Scale) -> list[Figure]:
    """What the pool adds to a request when there is no other."""

    def p50_ms(kind: str) -> float:
        order = run.order(kind, sessions=scale.requests, lanes=1, tokens=_SHORT, finish=False)
        return statistics.median(run.load.run(_fresh(order)).latencies_s) * 1e3

    rounds = [(p50_ms("generate"), p50_ms("responses")) for _ in range(scale.rounds + 1)][1:]
    return [
        Figure(
            name="latency p50 of /generate, one at a time", unit="ms", rounds=[a for a, _ in rounds]
        ),
        Figure(
            name="added by the pool over HTTP, p50",
            unit="ms",
            rounds=[b - a for a, b in rounds],
            must=3,
            stretch=1,
        ),
    ]


def real(scale: Scale) -> list[Figure]:
    """Throughput of one saturated stock SGLang, through the pool and without it."""
    shape: dict[str, Any] = {"sessions": 2 * _LANES, "lanes": _LANES, "tokens": 64}
    taken: dict[str, list[float]] = {"direct": [], "responses": []}
    with running(stock(_LANES)) as run:
        for number in range(-1, scale.rounds):  # the first warms up and fills the prefix cache
            for kind in sorted(taken, reverse=number % 2 == 0):
                result = run.load.run(_fresh(run.order(kind, **shape)))
                run.drain()
                if number >= 0:
                    taken[kind].append(result.tokens / result.seconds)
    return [
        Figure(
            name="stock SGLang, tiny model: direct client", unit="tok/s", rounds=taken["direct"]
        ),
        Figure(
            name="stock SGLang, tiny model: pool over HTTP / direct client",
            unit="x",
            rounds=ratios(taken["responses"], taken["direct"]),
            better="more",
            must=0.95,
            stretch=0.99,
        ),
    ]


def measure(parts: set[Part], scale: Scale) -> Report:
    """Measure the parts, one after the other."""
    report = Report("What a turn costs")
    if Part.PARSE in parts:
        report.add(*parsing(scale.rounds))
    with_pool: dict[Part, Callable[[Bench], list[Figure]]] = {
        Part.LATENCY: lambda run: latency(run, scale),
        Part.CPU: lambda run: turn_cpu(run, scale),
        Part.HAND_OFF: lambda run: hand_off(run, scale.rounds),
    }
    if parts & with_pool.keys():
        with running(scripted()) as run:
            for part, work in with_pool.items():
                if part in parts:
                    report.add(*work(run))
    if Part.REAL in parts:
        report.add(*real(scale))
    report.notes |= {
        "rounds": scale.rounds,
        "CPU": "scheduler run time of all threads of a process; pool = " + " + ".join(ACTORS),
        "load": f"{_LANES} at once, {_TOKENS} tokens a reply, every session finished",
    }
    return report


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="Few rounds, and no real engine.")] = False,
    part: Annotated[list[Part] | None, typer.Option(help="Only these parts.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Measure what a turn costs and compare it with what it may cost."""
    parts = set(part or Part) - ({Part.REAL} if quick and not part else set())
    report = measure(parts, _QUICK if quick else _FULL)
    report.show()
    if json is not None:
        report.write(json)


if __name__ == "__main__":
    app()
