"""What ``kv_connector_extra_config`` may hold, checked at start: an unknown key or a bad value stops the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from lmkv.config import Config
from lmkv.errors import ConfigError, nearest
from lmkv.server.client import Host
from lmkv.units import parse_number, parse_seconds

Int = Annotated[int, BeforeValidator(parse_number)]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(gt=0)]


class Options(BaseModel):
    """The connector's settings. ``config``, ``cpu_budget`` and ``tiers`` are for the host service this engine starts
    when there is none; one that runs already keeps its own."""

    model_config = {"frozen": True, "extra": "forbid"}

    socket: str = Field(default="", description="Unix socket of the host service; empty: the user's own default.")
    spawn: bool = Field(default=True, description="Start the host service when nobody listens on the socket.")
    linger: Seconds = Field(default=60.0, description="A service started here ends this long after its last client.")
    config: str = Field(default="", description="TOML or YAML file for a service started here.")
    cpu_budget: str = Field(default="", description="Its host memory: `8GiB`, or a fraction.")
    tiers: tuple[Any, ...] | str = Field(default=(), description="Its tiers below host memory: URLs or tables.")
    chunk_tokens: Int = Field(default=256, ge=1, description="Tokens a chunk; rounded up to whole vLLM blocks.")
    weights_id: str = Field(default="", description="A name for the weights, instead of a fingerprint of their files.")
    lookup_timeout: Seconds = Field(default=0.05, description="A lookup not answered by then is a miss.")
    load_timeout: Seconds = Field(default=30.0, description="A load not over by then is a failed one.")
    min_hit_tokens: Int = Field(default=0, ge=0, description="A hit that saves fewer tokens is not taken.")
    worth_it: bool = Field(
        default=True, description="Leave a hit that would load slower than it computes, as measured."
    )
    offload_prompt_only: bool = Field(default=False, description="Store prompts only, not what was generated.")
    copy_threads: Int = Field(default=0, ge=0, le=64, description="Threads of one copy; 0: one a core, at most 4.")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """Options from the extra config; ConfigError names the key and the nearest known one."""
        try:
            return cls.model_validate(dict(extra))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = str(first["loc"][0])
            where = f"kv_connector_extra_config.{key}"
            if first["type"] == "extra_forbidden":
                raise ConfigError(where, f"unknown key{nearest(key, cls.model_fields)}") from None
            raise ConfigError(where, f"{first['input']!r}: {first['msg']}") from None

    def service(self) -> Config:
        """The configuration of a service started here; the environment's ``LMKV_*`` variables count too."""
        names = ("cpu_budget", "tiers")
        given = {name: getattr(self, name) for name in names if name in self.model_fields_set}
        return Config.load(self.config or None, **given)

    def host(self, role: str) -> Host:
        """This process's view of the host service; ``register`` comes next."""
        return Host(
            self.socket,
            config=self.service(),
            spawn=self.spawn,
            linger=self.linger,
            name=f"vllm {role} {os.getpid()}",
            patience=self.lookup_timeout + 2.0,  # a remote tier may keep the service itself waiting
        )


def markdown() -> str:
    """The table of docs/vllm.md: every key, its default, its meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Options.model_fields.items():
        default = "" if field.default in ("", ()) else f"`{str(field.default).lower()}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines)
