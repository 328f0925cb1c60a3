"""What benchmarks share: accounts of CPU time, medians over rounds, and a table of verdicts."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

_libc = ctypes.CDLL(None, use_errno=True)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, from its scheduler clock: all threads, ended ones included."""
    clock = ctypes.c_int()
    if error := _libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise ProcessLookupError(error, os.strerror(error), str(pid))
    return time.clock_gettime(clock.value)


@dataclass(slots=True)
class Account:
    """CPU time by kind of process, from one call of ``spent`` to the next."""

    pids: Mapping[str, Sequence[int]]
    _last: dict[str, float] = field(default_factory=dict)

    def spent(self) -> dict[str, float]:
        """Seconds of each kind since the last call."""
        now = {kind: sum(map(cpu_seconds, pids)) for kind, pids in self.pids.items()}
        spent = {kind: now[kind] - self._last.get(kind, 0.0) for kind in now}
        self._last = now
        return spent


def children(kind_of: Callable[[list[str]], str | None]) -> dict[str, list[int]]:
    """Processes below this one, by the kind that ``kind_of`` gives their command line."""
    found: dict[str, list[int]] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            kind = kind_of(process.cmdline())
        except psutil.Error:
            continue
        if kind is not None:
            found.setdefault(kind, []).append(process.pid)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured figure: the median of its rounds, and what it should be."""

    name: str
    unit: str
    rounds: list[float]
    better: Literal["less", "more"] = "less"
    must: float | None = None
    stretch: float | None = None
    detail: str = ""

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def verdict(self) -> str:
        """How the value stands to what it should be."""
        if self.must is None:
            return ""
        if self.stretch is not None and self._reaches(self.stretch):
            return "stretch"
        return "pass" if self._reaches(self.must) else "FAIL"

    def _reaches(self, target: float) -> bool:
        return self.value <= target if self.better == "less" else self.value >= target


@dataclass(slots=True)
class Report:
    """The figures of one run and the circumstances they were taken in."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)

    def add(self, *figures: Figure) -> None:
        """Add figures, in the order in which they are to be read."""
        self.figures += figures

    def show(self) -> None:
        """Print the table."""
        table = Table(title=self.title)
        table.add_column("figure")
        for name in ("median", "least", "most", "must", "stretch"):
            table.add_column(name, justify="right")
        table.add_column("verdict")
        for figure in self.figures:
            sign = "<=" if figure.better == "less" else ">="
            table.add_row(
                f"{figure.name} [{figure.unit}]".replace("[", r"\["),
                *(_short(v) for v in (figure.value, min(figure.rounds), max(figure.rounds))),
                *(
                    "" if v is None else f"{sign} {_short(v)}"
                    for v in (figure.must, figure.stretch)
                ),
                figure.verdict,
            )
            if figure.detail:
                table.add_row(f"  {figure.detail}", style="dim")
        console = Console(width=None if os.isatty(1) else 130)
        console.print(table)
        for name, value in self._circumstances().items():
            console.print(f"{name}: {value}", highlight=False)

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        figures = [asdict(f) | {"value": f.value, "verdict": f.verdict} for f in self.figures]
        content = {"title": self.title, "figures": figures, **self._circumstances()}
        path.write_text(json.dumps(content, indent=1) + "\n")

    def _circumstances(self) -> dict[str, Any]:
        loads = [" ".join(f"{x:.1f}" for x in load) for load in (self.load_before, os.getloadavg())]
        machine = {"cpus": os.cpu_count(), "load average before / after": " / ".join(loads)}
        return machine | self.notes


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def ratios(above: Iterable[float], below: Iterable[float]) -> list[float]:
    """Round by round: what was measured side by side is compared side by side."""
    return [a / b for a, b in zip(above, below, strict=True)]
