"""Configuration: mistakes are found before anything starts, and say what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout_workers.config import HttpConfig, PoolConfig
from rollout_workers.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs" / "pool"


def refused(tree: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        PoolConfig.load(tree, overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_load(path: Path) -> None:
    assert isinstance(PoolConfig.load(path), PoolConfig)


def test_defaults() -> None:
    config = PoolConfig.load({})
    assert config == PoolConfig()
    assert config.name == "policy"
    assert config.router.http.host == "127.0.0.1"
    assert not config.engine.trust_remote_code


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"router": {"session_ttl": 3}}, "router.session_ttl (did you mean session_ttl_s?)"),
        ({"engin": {}}, "engin (did you mean engine?)"),
        ({"router": {"http": {"prot": 1}}}, "router.http.prot (did you mean port?)"),
        ({"router": {"max_retrys": 1}}, "router.max_retrys (known here: shards, http"),
        ({"workers": {"zzz": 1}}, "known here: count, label_selector"),
    ],
)
def test_unknown_key_names_the_near_one(tree: Any, said: str) -> None:
    assert said in refused(tree)


@pytest.mark.parametrize(
    ("tree", "path", "value"),
    [
        ({"engine": {"device": "tpu"}}, "engine.device", "'tpu'"),
        ({"router": {"request_timeout_s": -1}}, "router.request_timeout_s", "-1"),
        ({"router": {"request_timeout_s": "soon"}}, "router.request_timeout_s", "'soon'"),
        ({"router": {"shards": 2}}, "router.shards", "2"),
        ({"router": {"http": {"port": 70000}}}, "router.http.port", "70000"),
        ({"workers": {"count": 0}}, "workers.count", "0"),
        ({"workers": {"count": 1.5}}, "workers.count", "1.5"),
        ({"sampling": {"temperature": 2.1}}, "sampling.temperature", "2.1"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature", "nan"),
        ({"sampling": {"temperature": 1e-7}}, "sampling.temperature", "1e-07"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p", "0"),
        ({"engine": {"env": {"A": 1}}}, "engine.env.A", "***, of type int"),
        ({"router": [1]}, "router", "a list"),
        ({"engine": {"model": ""}}, "engine.model", "''"),
        ({"engine": None}, "engine", "None"),
        ({"name": "a b"}, "name", "'a b'"),
        ({"name": "a\n"}, "name", "'a\\n'"),
        ({"run_id": "x" * 129}, "run_id", "'xxx"),
    ],
)
def test_wrong_value_names_field_and_value(tree: Any, path: str, value: str) -> None:
    message = refused(tree)
    assert message.startswith(f"{path}:")
    assert f"got {value}" in message


@pytest.mark.parametrize(
    "tree",
    [
        {"router": {"http": {"api_key": 70219}}},
        {"router": {"http": {"api_key": ["70219"]}}},
        {"router": [{"http": {"api_key": "70219"}}]},
        {"router": {"http": [{"api_key": "70219"}]}},
        {"engine": {"env": {"HF_TOKEN": 70219}}},
        {"engine": {"env": ["HF_TOKEN=70219"]}},
    ],
)
def test_a_mistake_is_told_without_secrets(tree: Any) -> None:
    assert "70219" not in refused(tree)


def test_all_mistakes_are_told_at_once() -> None:
    lines = refused({"name": "a b", "workers": {"count": 0}, "bogus": 1}).splitlines()
    assert len(lines) == 3


def test_numbers_as_text_are_numbers() -> None:
    config = PoolConfig.load({"router": {"request_timeout_s": "30"}})
    assert config.router.request_timeout_s == 30.0


def test_sglang_flags_pass_through() -> None:
    args = {"attention-backend": "torch_native", "a flag of tomorrow": [1, None]}
    assert PoolConfig.load({"engine": {"args": args}}).engine.args == args


def test_overrides_win_and_keep_types() -> None:
    tree = {"engine": {"model": "a", "args": {"x": 1}}, "workers": {"count": 1}}
    config = PoolConfig.load(
        tree,
        [
            "engine.model=/some/where=else",
            "workers.count=3",
            "engine.args.y=true",
            "router.http.port=8000",
            "buffer.fsync=true",
            "engine.dtype=",
        ],
    )
    assert config.engine.model == "/some/where=else"
    assert config.workers.count == 3
    assert config.engine.args == {"x": 1, "y": True}
    assert config.router.http.port == 8000
    assert config.buffer.fsync is True
    assert config.engine.dtype is None


def test_overrides_leave_the_callers_mapping_alone() -> None:
    tree: dict[str, Any] = {"engine": {"model": "a"}}
    assert PoolConfig.load(tree, ["engine.model=b"]).engine.model == "b"
    assert tree == {"engine": {"model": "a"}}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("engine.model", "--set wants dotted.key=value"),
        ("=x", "--set wants dotted.key=value"),
        ("name.model=x", "name is not a section"),
        ("engine.model=[", "the value is not YAML"),
        ("engine.modle=x", "did you mean model?"),
    ],
)
def test_wrong_override(override: str, said: str) -> None:
    assert said in refused({"name": "p"}, override)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.7", "::"])
def test_exposed_front_door_needs_a_key(host: str) -> None:
    assert "router.http.api_key" in refused({"router": {"http": {"host": host}}})
    tree = {"router": {"http": {"host": host, "api_key": "secret"}}}
    assert PoolConfig.load(tree).router.http.host == host


def test_exposed_front_door_is_checked_however_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"router\.http\.host is 10\.0\.0\.7, which others"):
        HttpConfig(host="10.0.0.7")
    said = refused({"router": {"http": {"host": "0.0.0.0"}}})
    assert said.startswith("router.http.host is 0.0.0.0, which others can reach: set router.http.")


def test_a_wildcard_is_told_as_an_address_of_the_node() -> None:
    every = HttpConfig(host="0.0.0.0", api_key="k")
    assert every.url_at("10.0.0.7", "http://0.0.0.0:80/v1") == "http://10.0.0.7:80/v1"
    assert every.url_at(None, "http://0.0.0.0:80/v1") == "http://0.0.0.0:80/v1"
    assert HttpConfig().url_at("10.0.0.7", "http://127.0.0.1:8/v1") == "http://127.0.0.1:8/v1"
    every = HttpConfig(host="::", api_key="k")
    assert every.url_at("fd00::7", "http://[::]:80/v1") == "http://[fd00::7]:80/v1"


def test_closed_front_door_needs_no_key() -> None:
    tree = {"router": {"http": {"host": "0.0.0.0", "enabled": False}}}
    assert PoolConfig.load(tree).router.http.enabled is False


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    assert f"no config file at {path}" in refused(path)
    path.write_text("engine: {model: a\n")
    assert "cannot be read as YAML" in refused(path)
    path.write_bytes(b"name: \xff")
    assert "cannot be read as YAML" in refused(path)
    path.write_text("- a\n- b\n")
    assert "must hold a mapping of sections, not a list" in refused(path)
    assert str(tmp_path) in refused(tmp_path)
    path.write_text("")
    assert PoolConfig.load(path) == PoolConfig()
    path.write_text("engine:\n  model: a\n")
    assert PoolConfig.load(str(path), ["engine.model=b"]).engine.model == "b"


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        PoolConfig().name = "other"
