"""Imports point downwards, pure modules stay pure, and importing the package is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout_workers

PACKAGE = Path(rollout_workers.__file__).parent
NAME = "rollout_workers"

# A module imports modules of earlier layers, or of its own layer where that makes no circle.
LAYERS = (
    ("errors", "config", "diagnosis", "ports", "node", "processes", "cpu_platform", "lease"),
    ("schema",),
    (
        "generation",
        "ledger",
        "fields",
        "responses",
        "reply",
        "routing",
        "identity",
        "outcome",
        "sessions",
        "backlog",
        "template",
    ),
    ("journal", "outbox", "models", "model_cache", "demo_models", "launch"),
    ("engine", "server"),
    ("turns", "http", "worker", "controller", "router", "buffer"),
    ("cluster", "pool"),
    ("cli", "__main__"),
)
PURE = ("errors", "config", "diagnosis", "schema", *LAYERS[2], "journal", "outbox")
HEAVY = ("ray", "aiohttp", "sglang", "torch")
EDGE_ONLY = {
    "ray": {"cluster", "pool", "cli", "lease", "worker", "controller"},
    "aiohttp": {"engine", "server", "http", "router", "worker", "controller"},
    "sglang": {"cpu_platform"},
}


def modules() -> list[str]:
    return sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")


def imported(module: str, *, lazily: bool = True) -> Iterator[str]:
    """What a module imports when it runs; without ``lazily`` only what its import needs."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazily:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            source = node.module or ""
            yield from ([f"{NAME}.{a.name}" for a in node.names] if source == NAME else [source])
        todo += ast.iter_child_nodes(node)


def ours(module: str, *, lazily: bool = True) -> set[str]:
    names = imported(module, lazily=lazily)
    return {name.removeprefix(f"{NAME}.") for name in names if name.startswith(f"{NAME}.")}


def layer(module: str) -> int:
    return next(number for number, names in enumerate(LAYERS) if module in names)


def test_every_module_has_its_layer() -> None:
    placed = [name for names in LAYERS for name in names]
    assert sorted(placed) == sorted(set(placed))
    assert set(modules()) <= set(placed)


@pytest.mark.parametrize("module", modules())
def test_imports_point_downwards(module: str) -> None:
    assert {name for name in ours(module) if layer(name) > layer(module)} == set()


def test_no_circles() -> None:
    left = {module: ours(module) for module in modules()}
    while left:
        free = {module for module, needs in left.items() if not needs & set(left)}
        assert free, f"these import each other: {sorted(left)}"
        left = {module: needs for module, needs in left.items() if module not in free}


@pytest.mark.parametrize("module", [name for name in PURE if name in modules()])
def test_pure_modules_stay_pure(module: str) -> None:
    assert {name for name in imported(module) if name.split(".")[0] in HEAVY} == set()


@pytest.mark.parametrize("library", EDGE_ONLY)
def test_edges(library: str) -> None:
    users = {
        module
        for module in modules()
        if any(name.split(".")[0] == library for name in imported(module))
    }
    assert users <= EDGE_ONLY[library]


def loaded_by(code: str) -> set[str]:
    """Top-level modules that are loaded after ``code`` in a new interpreter."""
    text = f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_the_package_is_light() -> None:
    loaded = loaded_by("import rollout_workers")
    assert not loaded & {"ray", "torch", "sglang", "transformers", "pyarrow", "numpy", "aiohttp"}


def test_pure_modules_load_nothing_heavy() -> None:
    names = [name for name in PURE if name in modules()]
    code = "\n".join(f"import rollout_workers.{name}" for name in names)
    assert not loaded_by(code) & {*HEAVY, "transformers"}


def test_public_names() -> None:
    assert all(getattr(rollout_workers, name) is not None for name in rollout_workers.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nope'"):
        _ = rollout_workers.Nope
