"""Configuration: one typed tree from defaults, a file, ``LMKV_*`` variables and arguments.

    config = Config.load("lmkv.toml", cpu_budget="8GiB")     # later sources win, key by key
    config.cpu.budget.resolve(memory_limit())                # bytes
    config.origin("cpu.budget")                              # "argument"

Anything unknown or out of range is a ``ConfigError`` with the key, the value, where it came from
and the nearest known key; nothing is ignored. ``lmkv config docs`` prints the reference tables of
docs/configuration.md.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from lmkv.errors import ConfigError
from lmkv.units import Size, memory_limit, parse_bytes, parse_number, parse_seconds

toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

__all__ = ["Config", "CpuConfig", "Size", "TierConfig", "markdown", "memory_limit", "nearest"]

SizeField = Annotated[Size, PlainValidator(Size.parse), PlainSerializer(str)]
Bytes = Annotated[int, PlainValidator(parse_bytes)]
Int = Annotated[int, BeforeValidator(parse_number)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CpuConfig(_Model):
    """Host memory, the first tier."""

    budget: SizeField = Field(
        default=Size(fraction=0.25),
        description="Host memory for chunks; a fraction is of what the cgroup or machine allows.",
    )
    slab: Bytes = Field(
        default=64 << 20, description="Memory comes from the system, and returns, in slabs of this size."
    )
    huge_pages: bool = Field(default=True, description="Back the slabs with transparent huge pages.")
    touch: bool = Field(default=True, description="Fault the memory in at start, in the background, not at first use.")
    lease_timeout: Seconds = Field(
        default=60.0, description="An acquired prefix that nobody retrieves is let go after this."
    )


class TierConfig(_Model):
    """One tier below host memory: a table, or a URL with these keys as query options."""

    url: str = Field(
        description="Backend, folder or address, and the backend's own options: `disk:///var/cache/lmkv?fsync=1`."
    )
    budget: SizeField | None = Field(
        default=Size(fraction=0.5),
        description="Most the tier may hold; a fraction is of the free space and what it holds, "
        "and no limit where that cannot be known.",
    )
    codec: str = Field(default="raw", description="How chunks are written: `raw`, `zstd`, or a plug-in.")
    level: Int | None = Field(default=None, description="Level of the codec; empty: the codec's own.")
    admission: Literal["all", "second_touch", "on_eviction"] = Field(
        default="all",
        description="What is written: `all`, `second_touch` (reused once) or `on_eviction` (leaving host memory).",
    )
    readers: Int = Field(default=4, ge=1, le=256, description="Reads in flight.")
    writers: Int = Field(default=2, ge=1, le=256, description="Writes in flight.")
    ttl: Seconds | None = Field(
        default=None, description="Chunks expire this long after they were stored; empty: never."
    )
    max_write_delay: Seconds = Field(
        default=30.0, description="A write that would wait longer than this is dropped, and counted."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_url(cls, data: object) -> object:
        given = {"url": data} if isinstance(data, str) else data
        if not isinstance(given, Mapping) or not isinstance(url := given.get("url"), str):
            return data
        base, _, query = url.partition("?")
        if not re.match(r"[a-z][a-z0-9+.-]*://", base):
            raise ValueError("is not a URL: a folder is written disk:///path")
        pairs = parse_qsl(query, keep_blank_values=True)
        counts = Counter([name for name, _ in pairs] + [name for name in given if name != "url"])
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"sets {twice[0]} twice")
        ours = {name: value for name, value in pairs if name in cls.model_fields and name != "url"}
        rest = [(name, value) for name, value in pairs if name not in ours]
        return {**given, **ours, "url": base + ("?" + urlencode(rest, safe="/:,") if rest else "")}


class Config(_Model):
    """Everything that can be set. ``load`` reads all sources."""

    chunk_tokens: Int = Field(
        default=256, ge=1, le=1 << 16, description="Tokens a chunk: the unit of keys and storage."
    )
    copy_threads: Int = Field(default=0, ge=0, le=256, description="Threads that copy pages; 0: one a core, at most 4.")
    policy: str = Field(default="lru", description="Which chunks leave a full tier first.")
    min_hit_tokens: Int = Field(default=0, ge=0, description="A hit shorter than this is not taken.")
    operation_timeout: Seconds = Field(default=30.0, description="A read that takes longer is a miss.")
    close_timeout: Seconds = Field(default=5.0, description="Closing waits at most this long for writes under way.")
    cpu: CpuConfig = Field(default=CpuConfig(), description="Host memory.")
    tiers: tuple[TierConfig, ...] = Field(
        default=(), description="Tiers below host memory, fastest first: tables, or URLs."
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("tiers", mode="before")
    @classmethod
    def _split_tiers(cls, value: object) -> object:
        return value.split() if isinstance(value, str) else value

    @field_validator("tiers")
    @classmethod
    def _distinct_tiers(cls, tiers: tuple[TierConfig, ...]) -> tuple[TierConfig, ...]:
        if len({tier.url.partition("?")[0] for tier in tiers}) < len(tiers):
            raise ValueError("names a tier twice")
        return tiers

    @classmethod
    def load(cls, path: str | Path | None = None, env: Mapping[str, str] = os.environ, **overrides: Any) -> Config:
        """Defaults, then the file (``path``, else ``$LMKV_CONFIG``), ``env``, ``overrides``.

        Overrides are fields (``tiers=["disk:///p"]``, ``cpu={"budget": "1GiB"}``) or flat names
        (``cpu_budget="1GiB"``). ConfigError: anything unknown, out of range, or no such file.
        """
        path = env.get("LMKV_CONFIG") if path is None else path
        settings = [] if path is None else [*_flatten(_read(Path(path)), f"file {path}")]
        variables = {"LMKV_" + name.upper(): key for name, key in _flat_names().items()}
        for name, value in env.items():
            if name in variables:
                settings.append((variables[name], value, f"env {name}"))
            elif name.startswith("LMKV_") and name != "LMKV_CONFIG":
                hint = nearest(name, [*variables, "LMKV_CONFIG"])
                raise ConfigError(name, f"unknown variable{hint}")
        return cls._build([*settings, *_arguments(overrides)])

    def override(self, **overrides: Any) -> Config:
        """A copy with ``overrides``, as for ``load``, on top."""
        mine = _flatten(self.model_dump(exclude_unset=True), "argument")
        settings = [(key, value, self._origins.get(key, where)) for key, value, where in mine]
        return self._build([*settings, *_arguments(overrides)])

    @classmethod
    def _build(cls, settings: Iterable[tuple[str, Any, str]]) -> Config:
        tree: dict[str, Any] = {"cpu": {}}
        origins: dict[str, str] = {}
        for key, value, where in settings:
            table, dot, name = key.partition(".")
            (tree[table] if dot else tree)[name if dot else table] = value
            origins[key] = where
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            raise _config_error(error, origins) from None
        config._origins.update(origins)
        return config

    def origin(self, key: str) -> str:
        """Source of a dotted key: ``default``, ``file …``, ``env LMKV_…`` or ``argument``."""
        node: Any = self
        *parents, last = key.split(".")
        for part in parents:
            node = node[int(part)] if isinstance(node, tuple) else getattr(node, part)
        if last not in node.model_fields_set:
            return "default"
        return self._origins.get("tiers" if parents[:1] == ["tiers"] else key, "argument")

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Every effective value: dotted key, value as text, origin."""
        models: list[tuple[str, BaseModel]] = [("", self), ("cpu.", self.cpu)]
        models += [(f"tiers.{index}.", tier) for index, tier in enumerate(self.tiers)]
        for prefix, model in models:
            for name in type(model).model_fields:
                if prefix or name not in ("cpu", "tiers"):
                    value = _text(name, getattr(model, name))
                    yield prefix + name, value, self.origin(prefix + name)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown ``name``: what was meant, else all there is."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"


def _flat_names() -> dict[str, str]:
    """``cpu_budget`` -> ``cpu.budget`` for what a variable or a flat argument can set."""
    names = {name: name for name in Config.model_fields if name != "cpu"}
    return names | {f"cpu_{name}": f"cpu.{name}" for name in CpuConfig.model_fields}


def _flatten(tree: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any, str]]:
    """Settings of one source; those of the cpu table one by one, so that sources can share it."""
    for key, value in tree.items():
        if "." in str(key):
            hint = nearest(str(key), Config.model_fields)
            raise ConfigError(str(key), f"unknown key{hint} (from {where})")
        if key != "cpu":
            yield str(key), value, where
            continue
        table = value.model_dump(exclude_unset=True) if isinstance(value, CpuConfig) else value
        if not isinstance(table, Mapping):
            raise ConfigError("cpu", f"{value!r} should be a table (from {where})")
        yield from ((f"cpu.{name}", inner, where) for name, inner in table.items())


def _arguments(overrides: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    flat = _flat_names()
    for name, value in overrides.items():
        if name in flat:
            yield flat[name], value, "argument"
        else:
            yield from _flatten({name: value}, "argument")


def _read(path: Path) -> Mapping[Any, Any]:
    """The tree in a .toml, .yaml or .yml file."""
    try:
        if path.suffix == ".toml":
            tree = toml.loads(path.read_text("utf-8"))
        elif path.suffix in (".yaml", ".yml"):
            yaml: Any = importlib.import_module("yaml")
            tree = yaml.safe_load(path.read_text("utf-8"))
        else:
            raise ConfigError("config", f"'{path}' should be a .toml, .yaml or .yml file")
    except ImportError:
        message = f"'{path}' needs PyYAML: pip install pyyaml, or use TOML"
        raise ConfigError("config", message) from None
    except OSError as error:
        raise ConfigError("config", f"cannot read '{path}': {error.strerror}") from None
    except ConfigError:
        raise
    except Exception as error:  # the parsers' own errors, which share no base class
        message = f"'{path}' cannot be parsed: {' '.join(str(error).split())}"
        raise ConfigError("config", message) from None
    if not isinstance(tree, Mapping | None):
        raise ConfigError("config", f"'{path}' should hold a table, not {type(tree).__name__}")
    return tree or {}


def _config_error(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False)[0]
    table, *rest = (str(part) for part in first["loc"])
    key = ".".join([table, *rest])
    if first["type"] == "missing":
        message = "is required"
    elif first["type"] == "extra_forbidden":
        tables: dict[str, type[BaseModel]] = {"cpu": CpuConfig, "tiers": TierConfig}
        inner = tables[table].model_fields if rest else [*Config.model_fields]
        known = inner if rest else [*inner, *_flat_names().values()]
        message = f"unknown key{nearest([table, *rest][-1], known)}"
    else:
        reason = first["msg"].removeprefix("Value error, ").replace("Input should", "should")
        reason = reason.replace("a valid tuple", "a list of tables or URLs")
        message = f"{str(first['input'])[:200]!r} {reason}"
    where = origins.get(key) or origins.get(table)
    return ConfigError(key, message + (f" (from {where})" if where else ""))


def _text(name: str, value: object) -> str:
    """A value as it would be written in a file."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(Size(nbytes=value) if name == "slab" and isinstance(value, int) else value)


def markdown() -> str:
    """The tables of docs/configuration.md: every key, its default, its variable, its meaning."""
    lines: list[str] = []
    models: list[tuple[str, type[BaseModel]]]
    models = [("", Config), ("cpu.", CpuConfig), ("tiers.N.", TierConfig)]
    for prefix, model in models:
        lines += ["| key | default | variable | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            if name == "cpu":
                continue
            default = "required" if field.is_required() else f"`{_text(name, field.default)}`"
            default = "" if field.default in (None, ()) else default
            variable = f"`LMKV_{(prefix + name).replace('.', '_').upper()}`"
            variable = "in `LMKV_TIERS`" if model is TierConfig else variable
            lines.append(f"| `{prefix}{name}` | {default} | {variable} | {field.description} |")
        lines.append("")
    return "\n".join(lines)
