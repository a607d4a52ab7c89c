"""``lmkv server``: the host service in the foreground; engines start it themselves where none runs."""

from __future__ import annotations

import json
import logging
import os
from typing import Annotated

import typer

from lmkv.cli.config import ConfigFile, check_names
from lmkv.config import Config
from lmkv.errors import ConfigError
from lmkv.server import election, service


def server(
    socket: Annotated[str, typer.Option(help="Where to listen; else in $XDG_RUNTIME_DIR, or /tmp.")] = "",
    config: ConfigFile = None,
    linger: Annotated[
        str | None, typer.Option(metavar="TIME", help="End so long after the last client; else never.")
    ] = None,
    settings: Annotated[str | None, typer.Option(hidden=True)] = None,
    ready: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Own host memory and the tiers below it, for every engine of this host. Exit 1 where another one does."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        loaded = Config.load(config) if settings is None else Config.load(env={}, **json.loads(settings))
        if linger is not None:
            loaded = loaded.override(linger=linger)
        path = election.socket_path(socket)
        # One started by hand is there for engines that are still to come.
        stays = ready < 0 and loaded.origin("linger") == "default"
        elected = service.main(path, check_names(loaded), ready, stays)
    except ConfigError as error:
        if ready >= 0:
            os.write(ready, f"{error.key}\n{error.message}".encode())
        raise
    if not elected and ready < 0:
        raise ConfigError("socket", f"a host service listens at {path} already")
