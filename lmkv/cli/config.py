"""``lmkv config``: what is set, where it came from, whether a file is right, and the reference."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from lmkv import eviction
from lmkv.cli.output import Json, emit
from lmkv.codec import classes
from lmkv.config import Config, markdown
from lmkv.errors import ConfigError, nearest

app = typer.Typer(no_args_is_help=True, help="Configuration: show, check, reference.")

ConfigFile = Annotated[Path | None, typer.Option("--config", "-c", help="TOML or YAML file; else $LMKV_CONFIG.")]


def check_names(config: Config) -> Config:
    """``config`` when its policy, codecs and backends exist here. ConfigError names the nearest."""
    eviction.policy(config.policy)
    for index, tier in enumerate(config.tiers):
        classes.choose(tier, key=f"tiers.{index}")
        scheme, known = tier.url.partition(":")[0], entry_points(group="lmkv.backends").names
        if scheme not in known:
            raise ConfigError(f"tiers.{index}.url", f"no backend {scheme!r}{nearest(scheme, known)}")
    return config


@app.command()
def show(config: ConfigFile = None, json: Json = False) -> None:
    """Every effective value and where it came from."""
    rows = check_names(Config.load(config)).rows()
    emit([{"key": key, "value": value, "from": origin} for key, value, origin in rows], json)


@app.command()
def check(file: Path) -> None:
    """Check a configuration file by itself; exit 1 with the reason when it is refused."""
    check_names(Config.load(file, env={}))
    print(f"{file}: fine")


@app.command()
def docs() -> None:
    """The reference tables of docs/configuration.md."""
    print(markdown(), end="")
