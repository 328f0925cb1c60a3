"""The tokenizer T0 as model directories, one per chat template, and engines to run against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import settings
from local import CHATML, VOCAB_SIZE, Rig, build_model, config, running
from scripted_engine import Script, ScriptedEngine

from rollout_workers.template import ChatTemplate

settings.register_profile("suite", deadline=None)  # a busy machine is not a failure
settings.load_profile("suite")

MakeModel = Callable[[str | None], Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Model directories with T0 by chat template, each built once."""
    built: dict[str | None, Path] = {}

    def make(template: str | None = CHATML) -> Path:
        if template not in built:
            built[template] = build_model(tmp_path_factory.mktemp("t0"), template)
        return built[template]

    return make


@pytest.fixture(scope="session")
def make_template(make_model: MakeModel) -> Callable[[str], ChatTemplate]:
    loaded: dict[str, ChatTemplate] = {}

    def make(template: str) -> ChatTemplate:
        if template not in loaded:
            loaded[template] = ChatTemplate(make_model(template))
        return loaded[template]

    return make


@pytest.fixture(scope="session")
def t0(make_model: MakeModel) -> Path:
    """The model directory of T0 with its own template."""
    return make_model(CHATML)


@pytest.fixture(scope="session")
def template(make_template: Callable[[str], ChatTemplate]) -> ChatTemplate:
    return make_template(CHATML)


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    """An instant engine with T0's vocabulary and the keys that workers publish."""
    script = Script(tokens=4, vocab_size=VOCAB_SIZE)
    async with ScriptedEngine(script, api_key="key", admin_key="admin", version="0") as running_:
        yield running_


@pytest.fixture
async def rig(t0: Path, engine: ScriptedEngine) -> AsyncIterator[Rig]:
    """A router over ``engine`` and a buffer, without a front door."""
    async with running(config(t0), engine) as started:
        yield started
