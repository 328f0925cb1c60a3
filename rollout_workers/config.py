"""One pydantic tree, one YAML file, one pool.

Unknown keys are errors that name the nearest known one; ``--set engine.model=PATH`` overrides use
the same tree. SGLang's own flags pass through under ``engine.args`` and are not mirrored here.
"""

from __future__ import annotations

import copy
import difflib
import errno
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rollout_workers.errors import ConfigError

IDENTIFIER = r"^[A-Za-z0-9._:-]{1,128}$"  # sessions, groups, pools: safe in headers, paths, names
_LEAST_TEMPERATURE = 1e-6  # SGLang samples greedily below it, at the logprobs of temperature 1


def check_temperature(value: float) -> float:
    """Refuse a temperature that the engine would quietly take for another."""
    if 0 < value < _LEAST_TEMPERATURE:
        raise PydanticCustomError(
            "temperature", f"Input should be 0 (greedy) or at least {_LEAST_TEMPERATURE:g}"
        )
    return value


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class EngineConfig(_Section):
    """One SGLang server per worker."""

    model: str = Field(default="demo:smollm2", min_length=1)
    """``demo:smollm2``, ``demo:tiny``, a local directory, or a Hugging Face id."""
    device: Literal["cuda", "cpu"] = "cuda"
    tensor_parallel: int = Field(default=1, ge=1)
    dtype: str | None = None
    context_length: int | None = Field(default=None, ge=16)
    trust_remote_code: bool = False
    args: dict[str, Any] = {}
    """SGLang flags as they are spelled on its command line, without the dashes."""
    env: dict[str, str] = {}
    command: list[str] | None = None
    """Started instead of ``python -m sglang.launch_server``; gets the same flags."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    log_dir: Path | None = None
    """Where server logs go; a directory under the system's temporary one if unset."""


class WorkersConfig(_Section):
    """How many workers there are and where they may run."""

    count: int = Field(default=1, ge=1)
    label_selector: dict[str, str] = {}
    resources: dict[str, float] = {}
    """Extra Ray resources each worker asks for."""
    placement_timeout_s: float = Field(default=900.0, gt=0)
    """How long Ray may take to find, or an autoscaler to make, room for a worker."""


class HttpConfig(_Section):
    """The front door of router shard 0; further shards listen on ports of their own."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    """0 picks a free port."""
    api_key: str | None = None
    """Required from clients; needed when ``host`` is not loopback."""
    max_body_bytes: int = Field(default=32 << 20, ge=1024)

    @model_validator(mode="after")
    def _check_exposed(self) -> HttpConfig:
        if self.enabled and self.host not in {"127.0.0.1", "localhost", "::1"} and not self.api_key:
            raise ValueError(
                f"router.http.host is {self.host}, which others can reach: set "
                "router.http.api_key, or bind 127.0.0.1"
            )
        return self

    def url_at(self, address: str | None, url: str) -> str:
        """``url``, with an ``address`` of the node where the host is none to connect to."""
        if address is None or self.host not in {"0.0.0.0", "::"}:
            return url
        shown = f"[{address}]" if ":" in address else address
        return url.replace("[::]" if self.host == "::" else self.host, shown, 1)

    def explain(self, error: OSError) -> str:
        """Why nothing can listen here, and what to do."""
        if error.errno == errno.EADDRINUSE:
            return (
                f"router.http.port {self.port} is taken on {self.host}: choose another or 0 for any"
            )
        return f"router.http: cannot listen on {self.host} port {self.port}: {error}"


class RouterConfig(_Section):
    """Sessions, defaults of requests, and their limits."""

    shards: Literal[1] = 1
    http: HttpConfig = HttpConfig()
    session_ttl_s: float = Field(default=3600.0, gt=0)
    ephemeral_ttl_s: float = Field(default=60.0, gt=0)
    """How long an answer given outside any session may still be finished by its response id."""
    request_timeout_s: float = Field(default=3600.0, gt=0)
    """Deadline of a request that brings none of its own, queueing included."""
    return_token_ids: bool = False
    """Put token ids and logprobs on replies that do not say otherwise."""


class SamplingConfig(_Section):
    """What a request gets that does not set these itself; every value reaches the engine."""

    temperature: Annotated[float, AfterValidator(check_temperature)] = Field(
        default=1.0, ge=0, le=2
    )
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    max_output_tokens: int | None = Field(default=None, ge=1)
    """None leaves what is left of the context."""
    chat_template_kwargs: dict[str, Any] = {}


class BufferConfig(_Section):
    """Finished trajectories, until the trainer acknowledged them."""

    directory: Path | None = None
    """Spool directory; a new one under the system's temporary one if unset."""
    lease_s: float = Field(default=600.0, gt=0)
    fsync: bool = False
    block_rows: int = Field(default=64, ge=1)
    block_bytes: int = Field(default=4 << 20, ge=1)


class RayConfig(_Section):
    """How to reach Ray when the process has not done so itself."""

    address: str | None = None
    """None joins the cluster of the surrounding Ray job, else starts a private local one."""
    temp_dir: Path | None = None
    num_cpus: int | None = Field(default=None, ge=1)


class PoolConfig(_Section):
    """Everything about one pool."""

    name: str = Field(default="policy", pattern=IDENTIFIER)
    run_id: str = Field(default="run", pattern=IDENTIFIER)
    shared: bool = False
    """True lets the pool outlive the driver that started it."""
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    router: RouterConfig = RouterConfig()
    sampling: SamplingConfig = SamplingConfig()
    buffer: BufferConfig = BufferConfig()
    ray: RayConfig = RayConfig()

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> PoolConfig:
        """Read a YAML file or a mapping, apply ``key=value`` overrides, and check everything.

        Raises:
            ConfigError: the file is missing or not YAML, or a value or key is wrong; the message
                names each field, its value and what is allowed.
        """
        if isinstance(source, Mapping):
            tree = copy.deepcopy(dict(source))
        else:
            tree = _read_yaml(Path(source))
        for item in overrides:
            _override(tree, item)
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(error))) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"no config file at {path}: pass a YAML file such as those in configs/pool"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, not a {type(tree).__name__}")
    return tree


def _override(tree: dict[str, Any], item: str) -> None:
    key, sign, text = item.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set wants dotted.key=value, got {item!r}")
    *parents, last = key.split(".")
    for part in parents:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {item}: {part} is not a section")
        tree = child
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {item}: the value is not YAML: {error}") from None


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            yield f"unknown key {path}{_nearest(problem['loc'])}"
        elif problem["msg"].startswith(f"Value error, {path}."):  # it names its field itself
            yield problem["msg"].removeprefix("Value error, ")
        else:
            yield f"{path}: {problem['msg']}, got {_shown(problem['loc'], problem['input'])}"


def _shown(loc: tuple[int | str, ...], value: Any) -> str:
    """A value in words: none that may be, or may hold, a secret."""
    if isinstance(value, BaseModel | Mapping | list | tuple | set):
        return f"a {type(value).__name__}"
    if "api_key" in loc or "env" in loc:
        return f"***, of type {type(value).__name__}"
    return repr(value)


def _nearest(loc: tuple[int | str, ...]) -> str:
    section: Any = PoolConfig
    for part in loc[:-1]:
        known_fields = getattr(section, "model_fields", {})
        field = known_fields.get(part)
        section = field.annotation if field else None  # a section is a class of its own
    if not (isinstance(section, type) and issubclass(section, BaseModel)):
        return ""
    close = difflib.get_close_matches(str(loc[-1]), section.model_fields, n=1)
    known = (
        f"did you mean {close[0]}?" if close else f"known here: {', '.join(section.model_fields)}"
    )
    return f" ({known})"
