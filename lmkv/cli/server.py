"""``lmkv server``: the service in the foreground. Engines start one for their host themselves where none runs."""

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
    listen: Annotated[
        list[str] | None, typer.Option(metavar="HOST:PORT", help="Serve other machines; may be given again.")
    ] = None,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="They must know one of its tokens.")] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Speak TLS with this certificate.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its key, if in another file.")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="They must have a certificate of this authority.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve counters to Prometheus; PORT alone: on loopback.")
    ] = None,
    linger: Annotated[
        str | None, typer.Option(metavar="TIME", help="End so long after the last client; else never.")
    ] = None,
    settings: Annotated[str | None, typer.Option(hidden=True)] = None,
    ready: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Own host memory and the tiers below it, for every engine of this host, and for other machines with --listen.

    With --listen and without --socket there is nothing for engines of this host. Exit 1 where another one serves.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        loaded = Config.load(config) if settings is None else Config.load(env={}, **json.loads(settings))
        if linger is not None:
            loaded = loaded.override(linger=linger)
        over = {"listen": listen, "token_file": token_file, "tls_cert": tls_cert, "tls_key": tls_key}
        over |= {"tls_client_ca": tls_client_ca, "metrics": metrics}
        given = {f"server_{name}": value for name, value in over.items() if value}
        loaded = loaded.override(**given) if given else loaded
        path = None if loaded.server.listen and not socket else election.socket_path(socket)
        # One started by hand is there for engines that are still to come.
        stays = ready < 0 and loaded.origin("linger") == "default"
        elected = service.main(path, check_names(loaded), ready, stays)
    except ConfigError as error:
        if ready >= 0:
            os.write(ready, f"{error.key}\n{error.message}".encode())
        raise
    if not elected and ready < 0:
        raise ConfigError("socket", f"a host service listens at {path} already")
