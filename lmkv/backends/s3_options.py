"""Where an S3 tier is and how it is reached: its URL and options, its credentials, and what its errors mean."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote, urlsplit

from obstore import exceptions
from obstore.store import S3Store

from lmkv.backends.base import Result, Status
from lmkv.errors import ConfigError
from lmkv.units import Size, parse_bytes, parse_number, parse_seconds

_FLAGS = dict.fromkeys(("0", "off", "false", False), False) | dict.fromkeys(("1", "on", "true", True), True)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]", re.ASCII)
_FOLDER = re.compile(r"(?!\.\.?$)[\w.=-]+", re.ASCII)
_RETRIES = 3  # of one request, after a tenth of a second and more
_FRESH = timedelta(minutes=5)  # how long credentials are used before the chain is asked again
_FULL = {"QuotaExceeded", "EntityTooLarge", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull"}


class Options:
    """What the URL says, checked. ConfigError for what cannot work; nothing is asked of the network here."""

    def __init__(self, url: str, given: dict[str, object]) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or ":" in parts.netloc:
            raise _wrong(
                url.rpartition("@")[2], "takes no key or port: credentials come from boto3's chain, see docs/s3.md"
            )
        self.bucket, folders = parts.netloc, [each for each in parts.path.split("/") if each]
        if parts.scheme != "s3" or not _BUCKET.fullmatch(self.bucket) or parts.query or parts.fragment:
            raise _wrong(url, "write s3://bucket/prefix")
        if not all(map(_FOLDER.fullmatch, folders)):
            raise _wrong(url, "a prefix is letters, digits and _.=- between slashes")
        self.prefix = "".join(f"{each}/" for each in folders)
        self.endpoint, self.region = _endpoint(given["endpoint"]), str(given["region"])
        self.timeout = _seconds("timeout", given, 0.001)
        self.lookup_timeout = _seconds("lookup_timeout", given, 0.001)
        self.negative, self.positive = _seconds("negative", given), _seconds("positive", given)
        self.concurrency = _count("concurrency", given, 1, 1024)
        self.multipart = _bytes("multipart", given, 5 << 20, 5 << 30)
        self.anonymous = _flag("anonymous", given)
        self.path_style = bool(self.endpoint) if given["path_style"] == "auto" else _flag("path_style", given)
        shown = {"endpoint": self.endpoint, "region": self.region}
        shown |= {name: f"{getattr(self, name):g}s" for name in ("timeout", "lookup_timeout", "negative", "positive")}
        shown |= {"concurrency": str(self.concurrency), "multipart": str(Size(self.multipart))}
        shown |= {"path_style": str(int(self.path_style)), "anonymous": str(int(self.anonymous))}
        usual = DEFAULTS | {"path_style": str(int(bool(self.endpoint)))}
        query = "&".join(f"{name}={quote(text, safe=':/')}" for name, text in shown.items() if text != usual[name])
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/") + "?" * bool(query) + query


DEFAULTS = {
    "endpoint": "",
    "region": "",
    "timeout": "10s",
    "lookup_timeout": "1s",
    "concurrency": "16",
    "multipart": "64MiB",
    "negative": "5s",
    "positive": "60s",
    "path_style": "auto",
    "anonymous": "0",
}


class Credentials:
    """Finds keys the way boto3 does: environment, files and profiles, SSO, container and instance roles.

    obstore calls it when what it had is old. Keys that cannot expire are looked up anew, since their file may have
    changed; the others refresh themselves.
    """

    refresh_threshold = timedelta(minutes=1)

    def __init__(self) -> None:
        self.region = ""
        self._found = self._look()

    def _look(self) -> Any:
        import boto3  # type: ignore[import-untyped]

        session = boto3.Session()
        self.region = session.region_name or ""
        found = session.get_credentials()
        if found is None:
            raise LookupError("no credentials in the environment, in files, or from a role")
        return found

    def __call__(self) -> dict[str, Any]:
        """What obstore's ``credential_provider`` returns."""
        from botocore.credentials import RefreshableCredentials  # type: ignore[import-untyped]

        if not isinstance(self._found, RefreshableCredentials):
            with suppress(Exception):  # gone for a moment or for good: what there was may still do
                self._found = self._look()
        keys = self._found.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(timezone.utc) + _FRESH,
        }


def connect(options: Options) -> tuple[S3Store, S3Store]:
    """Two clients: one that repeats what a store was too busy for, and one for lookups, which is never worth a wait.

    Neither connects yet. ConfigError: no credentials, or a library is not installed.
    """
    try:
        provider = None if options.anonymous else Credentials()
    except ImportError as error:
        raise ConfigError("tiers.url", f"s3: {error}; pip install lmkv[s3]") from error
    except Exception as error:
        fix = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or anonymous=1"
        raise ConfigError("tiers.url", f"s3: {error}; {fix}") from error
    endpoint = options.endpoint
    if endpoint and not options.path_style:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{options.bucket}.{host}"
    config: Any = {
        "region": options.region or (provider.region if provider else "") or "us-east-1",
        "virtual_hosted_style_request": not options.path_style,
        "skip_signature": options.anonymous,
        "unsigned_payload": True,  # hashing it costs more than sending it, and a container has checksums inside
        "disable_bulk_delete": True,  # one by one the ends are known one by one
    }
    config |= {"endpoint": endpoint} if endpoint else {}
    keys: dict[str, Any] = {"credential_provider": provider} if provider else {}

    def client(timeout: float, retries: int) -> S3Store:
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2}
        retry: Any = {"max_retries": retries, "retry_timeout": timedelta(seconds=timeout), "backoff": backoff}
        limits: Any = {
            "allow_http": options.endpoint.startswith("http://"),
            "timeout": timedelta(seconds=timeout + 1),  # the caller gives up before
            "connect_timeout": timedelta(seconds=min(timeout, 5)),
            "pool_max_idle_per_host": str(options.concurrency),
        }
        return S3Store(options.bucket, config=config, client_options=limits, retry_config=retry, **keys)

    try:
        return client(options.timeout, _RETRIES), client(options.lookup_timeout, 0)
    except exceptions.BaseError as error:  # obstore reads further AWS_* variables
        raise ConfigError("tiers.url", f"s3: {str(error).partition(chr(10))[0]}") from error


def meaning(error: BaseException) -> Result:
    """What an exception of obstore's says about an object, in a few words that hold no address and no key."""
    text, status, code = _parts(error)
    words = " ".join(each for each in (status, code) if each)
    if isinstance(error, FileNotFoundError):
        return Result(Status.MISSING) if code != "NoSuchBucket" else Result(Status.ERROR, detail="no such bucket")
    if isinstance(error, exceptions.PermissionDeniedError):
        return Result(Status.ERROR, detail=f"access denied ({words})")
    if isinstance(error, exceptions.UnauthenticatedError):
        return Result(Status.ERROR, detail=f"not authenticated ({words or 'no fresh credentials'})")
    if "kind: Timeout" in text:
        return Result(Status.TIMEOUT, detail="timeout")
    if "BareRedirect" in text:
        return Result(Status.ERROR, detail="redirected: wrong region or endpoint")
    if "kind: Interrupted" in text:
        return Result(Status.ERROR, detail="connection lost")
    found = re.search(r'message: "([^"]{1,80})"', text) or re.search(r"kind: (\w+)", text)
    return Result(Status.ERROR, detail=words or (found[1].lower() if found else type(error).__name__))


def refusal(error: BaseException, readable: bool) -> Result:
    """The same of a put. readable: the store lets us read, so if it denies a put, that is about rights."""
    _, status, code = _parts(error)
    result = meaning(error)
    if code in _FULL or status == "507":
        return Result(Status.FULL, detail=f"{status} {code}".strip())
    if result.status is Status.MISSING:
        return Result(Status.ERROR, detail="no such bucket")
    if readable and isinstance(error, exceptions.PermissionDeniedError) and code in ("AccessDenied", ""):
        return Result(Status.READ_ONLY, detail=result.detail)
    return result


def unsupported(error: BaseException) -> bool:
    """The store does not know what it was asked for."""
    _, status, code = _parts(error)
    return status == "501" or code == "NotImplemented"


def _parts(error: BaseException) -> tuple[str, str, str]:
    """Text, HTTP status and S3 error code, as far as there are any."""
    text = str(error)
    status, code = re.search(r"status code: (\d+)", text), re.search(r"<Code>(\w+)</Code>", text)
    return text, status[1] if status else "", code[1] if code else ""


def _wrong(what: object, fix: str) -> ConfigError:
    return ConfigError("tiers.url", f"s3: {what!r}: {fix}")


def _endpoint(value: object) -> str:
    text = str(value or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "").rstrip("/")
    try:
        parts = urlsplit(text)
        plain = not text or (parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
    except ValueError:
        plain = False
    if not plain or "@" in text or parts.path or parts.query or parts.fragment:
        raise _wrong(text.rpartition("@")[2], "endpoint is http://host:port or https://host, and holds no key")
    return text


def _seconds(name: str, given: dict[str, object], least: float = 0) -> float:
    try:
        seconds = float(parse_seconds(given[name]))  # type: ignore[arg-type]
        if least <= seconds < 1e6:
            return seconds
    except (ValueError, TypeError):
        pass
    raise _wrong(given[name], f"{name} is a time such as 500ms or 10s")


def _count(name: str, given: dict[str, object], least: int, most: int) -> int:
    try:
        number = int(str(parse_number(given[name])))
        if least <= number <= most:
            return number
    except ValueError:
        pass
    raise _wrong(given[name], f"{name} is a number from {least} to {most}")


def _bytes(name: str, given: dict[str, object], least: int, most: int) -> int:
    try:
        number = parse_bytes(given[name])
        if least <= number <= most:
            return number
    except ValueError:
        pass
    raise _wrong(given[name], f"{name} is a size from {Size(least)} to {Size(most)}")


def _flag(name: str, given: dict[str, object]) -> bool:
    value = given[name]
    if not isinstance(value, str | bool) or value not in _FLAGS:
        raise _wrong(value, f"{name} is 0 or 1")
    return _FLAGS[value]
