"""Configuration: one typed tree from defaults, a file, ``LMKV_*`` variables and arguments.

    config = Config.load("lmkv.toml", cpu_budget="8GiB")     # later sources win, key by key
    config.cpu.budget.resolve(memory_limit())                # bytes
    config.origin("cpu.budget")                              # "argument"

Anything unknown or out of range is a ``ConfigError`` with the key, the value, its origin and the nearest known key.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

from pydantic import BaseModel, BeforeValidator, Field, PlainSerializer, ValidationError, field_validator

from lmkv.errors import ConfigError, nearest
from lmkv.units import Size, memory_limit, parse_bytes, parse_number, parse_seconds

__all__ = ["Config", "CpuConfig", "ServerConfig", "Size", "TierConfig", "markdown", "memory_limit"]

SizeField = Annotated[Size, BeforeValidator(Size.parse), PlainSerializer(str)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), PlainSerializer(lambda nbytes: str(Size(nbytes)))]
Int = Annotated[int, BeforeValidator(parse_number)]
Words = Annotated[tuple[str, ...], BeforeValidator(lambda value: value.split() if isinstance(value, str) else value)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]


class _Model(BaseModel):
    model_config = {"frozen": True, "extra": "forbid", "allow_inf_nan": False}


class CpuConfig(_Model):
    """Host memory, the first tier."""

    budget: SizeField = Field(
        default=Size(fraction=0.25),
        description="Host memory for chunks; a fraction is of what the cgroup or machine allows.",
    )
    slab: Bytes = Field(default=64 << 20, description="Memory comes from the system, and returns, in such pieces.")
    huge_pages: bool = Field(default=True, description="Back the slabs with transparent huge pages.")
    touch: bool = Field(default=True, description="Fault the memory in at start, in the background, not at first use.")
    lease_timeout: Seconds = Field(default=60.0, description="An acquired prefix not retrieved is let go after this.")


class ServerConfig(_Model):
    """`lmkv server` as other machines reach it."""

    listen: Words = Field(default=(), description="Serve `HOST:PORT` over TCP; several with spaces between.")
    token_file: str = Field(default="", description="A client must know one of the tokens in this file, one a line.")
    tls_cert: str = Field(default="", description="Speak TLS, with this certificate (PEM, its chain after it).")
    tls_key: str = Field(default="", description="The certificate's key, if it is in a file of its own.")
    tls_client_ca: str = Field(default="", description="A client must have a certificate of this authority.")
    verify: bool = Field(
        default=True, description="Check header and checksums of what is put; off: anything is stored, for tests."
    )
    tenant_budget: SizeField | None = Field(
        default=None,
        description="Most that the chunks of one salt may take, over all tiers; a fraction is of host memory.",
    )
    pin_share: float = Field(
        default=0.5, ge=0, le=1, description="Share of host memory, or of a tenant's budget, that clients may pin."
    )
    metrics: str = Field(default="", description="Serve the counters to Prometheus over HTTP at `HOST:PORT`.")
    max_connections: Int = Field(default=512, ge=1, le=1 << 16, description="More are refused.")
    idle_timeout: Seconds = Field(default=300.0, description="A connection without requests ends after this.")
    message_timeout: Seconds = Field(
        default=10.0, description="A message may take this long on the way, and a second more for each MiB."
    )


class TierConfig(_Model):
    """One tier below host memory: a table, or a URL with these keys as query options."""

    url: str = Field(description="Backend, place and the backend's own options: `disk:///var/cache/lmkv?fsync=1`.")
    budget: SizeField | None = Field(
        default=Size(fraction=0.5),
        description="Most the tier may hold; a fraction is of the free space, where known, and what it holds.",
    )
    codec: str = Field(
        default="raw",
        description="How chunks are written: an error class (`exact`, `kl<0.001`, `kl<0.01`, `kl<0.05`) or a codec "
        "([codecs](codecs.md)).",
    )
    level: Int | None = Field(
        default=None, description="Level of the codec, 0 the finest of lossy ones; empty: its own."
    )
    profile: str = Field(default="", description="The model's profile, for `klt` and the classes: a file, or its id.")
    admission: Literal["all", "second_touch", "on_eviction"] = Field(
        default="all",
        description="What is written: `all`, `second_touch` (used again) or `on_eviction` (leaving host memory).",
    )
    readers: Int = Field(default=4, ge=1, le=256, description="Reads in flight.")
    writers: Int = Field(default=2, ge=1, le=256, description="Writes in flight.")
    max_write_delay: Seconds = Field(default=30.0, description="A write that would wait longer is dropped.")


def _tier(data: object) -> object:
    """A tier's table, with those query options of its URL that are keys of it."""
    given = {"url": data} if isinstance(data, str) else data
    if not isinstance(given, Mapping) or not isinstance(url := given.get("url"), str):
        return data
    base, _, query = url.partition("?")
    if not re.match(r"[a-z][a-z0-9+.-]*://", base):
        raise ValueError("is not a URL: a folder is written disk:///path")
    pairs = parse_qsl(query, keep_blank_values=True)
    ours = {name: value for name, value in pairs if name in TierConfig.model_fields}
    rest = {name: value for name, value in pairs if name not in ours}
    names = [*given, *(name for name, _ in pairs)]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"sets {min(twice)} twice")
    return {**given, **ours, "url": base + ("?" + urlencode(rest, safe="/:,") if rest else "")}


class Config(_Model):
    """Everything that can be set. ``load`` reads all sources."""

    chunk_tokens: Int = Field(default=256, ge=1, le=1 << 16, description="Tokens a chunk: what is keyed and stored.")
    copy_threads: Int = Field(default=0, ge=0, le=256, description="Threads that copy pages; 0: one a core, at most 4.")
    policy: str = Field(default="lru", description="Which chunks leave a full tier first.")
    min_hit_tokens: Int = Field(default=0, ge=0, description="A hit shorter than this is not taken.")
    operation_timeout: Seconds = Field(default=30.0, description="A read that takes longer is a miss.")
    close_timeout: Seconds = Field(default=5.0, description="Closing waits at most this long for writes under way.")
    ttl: Seconds | None = Field(
        default=None, description="Chunks expire this long after they were stored, unless the store says otherwise."
    )
    linger: Seconds = Field(
        default=60.0, description="A host service that an engine started ends this long after its last client."
    )
    profiles: Words = Field(
        default=("~/.cache/lmkv/profiles",), description="Folders with codec profiles; several with spaces between."
    )
    cpu: CpuConfig = Field(default=CpuConfig(), description="Host memory.")
    server: ServerConfig = Field(default=ServerConfig(), description="`lmkv server` over TCP.")
    tiers: tuple[Annotated[TierConfig, BeforeValidator(_tier)], ...] = Field(default=(), description="Fastest first.")

    _origins: dict[str, str] = {}

    @field_validator("tiers", mode="wrap")
    @classmethod
    def _tiers(cls, value: object, validate: Callable[[object], tuple[TierConfig, ...]]) -> tuple[TierConfig, ...]:
        tiers = validate(value.split() if isinstance(value, str) else value)
        if len({tier.url.partition("?")[0] for tier in tiers}) < len(tiers):
            raise ValueError("names a tier twice")
        return tiers

    @classmethod
    def load(cls, path: str | Path | None = None, env: Mapping[str, str] = os.environ, **overrides: Any) -> Config:
        """Defaults, then the file (``path``, else ``$LMKV_CONFIG``), ``env``, ``overrides``.

        Overrides: ``tiers=["disk:///p"]``, ``cpu={"budget": "1GiB"}`` or, flat, ``cpu_budget="1GiB"``.
        """
        path = env.get("LMKV_CONFIG") if path is None else path
        settings = [] if path is None else [*_settings(_read(Path(path)), f"file {path}")]
        variables = {f"LMKV_{name.upper()}": key for name, key in _FLAT.items()}
        for name in sorted(each for each in env if each.startswith("LMKV_") and each != "LMKV_CONFIG"):
            if name not in variables:
                raise ConfigError(name, f"unknown variable{nearest(name, [*variables, 'LMKV_CONFIG'])}")
            settings.append((variables[name], env[name], f"env {name}"))
        return cls._build(settings, overrides)

    def override(self, **overrides: Any) -> Config:
        """A copy with ``overrides``, as for ``load``, on top."""
        mine = _settings(self.model_dump(exclude_unset=True), "argument")
        kept = [(key, value, self._origins.get(key, where)) for key, value, where in mine]
        return self._build(kept, overrides)

    @classmethod
    def _build(cls, settings: list[tuple[str, Any, str]], overrides: Mapping[str, Any]) -> Config:
        tree: dict[str, Any] = {name: {} for name in _TABLES}
        settings += _settings({_FLAT.get(name, name): value for name, value in overrides.items()}, "argument")
        origins = {key: where for key, _, where in settings}
        for key, value, _ in settings:
            table, dot, name = key.partition(".")
            inside = bool(dot) and table in _TABLES
            (tree[table] if inside else tree)[name if inside else key] = value
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            raise _config_error(error, origins) from None
        config._origins.update(origins)
        return config

    def origin(self, key: str) -> str:
        """Source of a dotted key: ``default``, ``file …``, ``env LMKV_…`` or ``argument``."""
        top, _, rest = key.partition(".")
        if top == "tiers" and rest:
            number, _, name = rest.partition(".")
            return self.origin("tiers") if name in self.tiers[int(number)].model_fields_set else "default"
        return self._origins.get(key, "default")

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Every effective value: dotted key, value as text, origin."""
        models: list[tuple[str, BaseModel]] = [("", self), ("cpu.", self.cpu), ("server.", self.server)]
        models += [(f"tiers.{n}.", tier) for n, tier in enumerate(self.tiers)]
        for prefix, model in models:
            for key, value in _texts(prefix, model):
                yield key, value, self.origin(key)


_TABLES: dict[str, type[_Model]] = {"cpu": CpuConfig, "server": ServerConfig}
# as in arguments and variables: cpu_budget
_FLAT = {name: name for name in Config.model_fields if name not in _TABLES}
_FLAT |= {f"{table}_{name}": f"{table}.{name}" for table, model in _TABLES.items() for name in model.model_fields}


def _settings(tree: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any, str]]:
    """Dotted key, value, origin of what one source sets; a table key by key, so that sources can share it."""
    for key, value in tree.items():
        table = value.model_dump(exclude_unset=True) if isinstance(value, _Model) else value
        if key not in _TABLES:
            yield str(key), value, where
        elif isinstance(table, Mapping):
            yield from ((f"{key}.{name}", inner, where) for name, inner in table.items())
        else:
            raise ConfigError(key, f"{value!r} should be a table (from {where})")


def _read(path: Path) -> Mapping[Any, Any]:
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            tree = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
        elif path.suffix in (".yaml", ".yml"):
            tree = importlib.import_module("yaml").safe_load(text)
        else:
            raise ValueError("should be a .toml, .yaml or .yml file")
        if not isinstance(tree, Mapping | None):
            raise ValueError(f"should hold a table, not {type(tree).__name__}")
    except ImportError:
        raise ConfigError("config", f"'{path}' needs PyYAML: pip install pyyaml, or use TOML") from None
    except Exception as error:  # the parsers' own errors share no base class
        raise ConfigError("config", f"cannot read '{path}': {' '.join(str(error).split())}") from None
    return tree or {}


def _config_error(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    key = ".".join(path)
    if first["type"] == "missing":
        message = "is required"
    elif first["type"] == "extra_forbidden":
        inner = _TABLES.get(path[0], TierConfig).model_fields
        known = [*Config.model_fields, *_FLAT.values()] if len(path) == 1 else inner
        message = f"unknown key{nearest(path[-1], known)}"
    else:
        reason = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
        message = f"{str(first['input'])[:200]!r} {reason}"
    return ConfigError(key, f"{message} (from {origins.get(key) or origins[path[0]]})")


def _texts(prefix: str, model: BaseModel) -> Iterator[tuple[str, str]]:
    """Dotted key and value, as it would be written in a file, of all but the tables below."""
    for name, value in model.model_dump(mode="json", exclude={*_TABLES, "tiers"}).items():
        text = "" if value is None else " ".join(value) if isinstance(value, list) else str(value)
        yield prefix + name, text.lower() if isinstance(value, bool) else text


def markdown() -> str:
    """The tables of docs/configuration.md: every key, its default, its variable, its meaning."""
    lines = []
    tables = [(f"{name}.", model()) for name, model in _TABLES.items()]
    for prefix, model in (("", Config()), *tables, ("tiers.N.", TierConfig(url="x://"))):
        lines += ["| key | default | variable | meaning |", "|---|---|---|---|"]
        for key, text in _texts(prefix, model):
            field = type(model).model_fields[key.removeprefix(prefix)]
            default = "required" if field.is_required() else f"`{text}`" if text else ""
            variable = "in `LMKV_TIERS`" if "N" in prefix else f"`LMKV_{key.replace('.', '_').upper()}`"
            lines.append(f"| `{key}` | {default} | {variable} | {field.description} |")
        lines.append("")
    return "\n".join(lines)
