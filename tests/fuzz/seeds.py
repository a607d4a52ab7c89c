"""Write the seeds of the corpus: one valid input or more for each target."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from cache_servers import whole  # noqa: E402
from targets import CODECS, PROFILES, TARGETS  # noqa: E402
from test_codec_klt import made  # noqa: E402

from lmkv import codec  # noqa: E402
from lmkv.codec import Meaning, Rope, profile  # noqa: E402
from lmkv.server import data as remote  # noqa: E402
from lmkv.server import protocol as host  # noqa: E402
from lmkv.testing.backend_tests import key_of  # noqa: E402
from lmkv.testing.codec_tests import PLAIN, encode, kv  # noqa: E402

AXES, ROPE = "kv head token dim", Rope((1.0, 0.1))


def seeds() -> dict[str, dict[str, bytes]]:
    """By target and name."""
    container, keys = bytes(whole(1, 2 * 4096)), host.pack_keys([key_of(1)])
    both = host.pack_keys([key_of(1), key_of(2)])
    requests: list[host.Message] = [
        remote.Contains(keys), remote.Get(both, [8192, 4096], 1.0), remote.Delete(keys), remote.List(0),
        remote.GetUsage(), remote.GetStats(), remote.Ping(),
    ]  # fmt: skip
    put = host.frame(remote.Put(keys, [len(container)])) + container
    pins: list[host.Message] = [remote.Pin("me", both, 1.0), remote.GetStats(), remote.Unpin("me", both)]
    pin = put + b"".join(map(host.frame, pins))
    everything = put + b"".join(host.frame(each) for each in requests)
    ask = host.Ask("owner", bytes(16), bytes(64), 16, b"\1", [host.Tail(0, b"\1", [b"\3"])], 1.0, 0)
    local: list[host.Message] = [
        host.Hello(1, bytes(16), "fuzz"), host.Register([8192]), host.Lookup([ask]), host.Release(["owner"]),
        host.Fetch(1, keys, [8192], 1.0), host.Reserve("owner", 1, keys, [8192], 1.0), host.Commit([1], [b""], 0),
        host.LetGo([1]), host.Clear(bytes(16), False), host.Flush(0.0), host.Events(bytes(16), 0), host.Bye(),
    ]  # fmt: skip
    return {
        "header": {"whole": container, "page": container[:4096]},
        "sealed": {"whole": container},
        "streams": dict(_streams()),
        "key": {"one": str(key_of(1)).encode()},
        "frames": {
            "local": b"".join(map(host.frame, local)),
            "remote": host.frame(requests[1])[4:],
            "meanings": host.frame(
                host.Register([8192], [(bytes(8), [Meaning("bfloat16", 2, 4, 4, AXES, ROPE), None])])
            ),
        },
        "resp": {
            "all": b"\3+OK\r\n-ERR no\r\n:12\r\n$5\r\nhello\r\n$-1\r\n*2\r\n$1\r\na\r\n:2\r\n",
            "long": b"\6$70\r\n" + bytes(70) + b"\r\n",
        },
        "server": {"everything": everything, "put": put, "cut": put[:5000], "two": put + put, "pin": pin},
    }


def _streams() -> Iterator[tuple[str, bytes]]:
    """A small part through each codec; klt's profile is made anew."""
    shape = replace(PLAIN, layers=1, pages=1, page_tokens=33)
    raw = kv(shape)
    PROFILES.mkdir(exist_ok=True)
    for old in PROFILES.iterdir():
        old.unlink()
    made(1, 0, True, replace(shape, page_tokens=1, first_token=0)).save(str(PROFILES))
    profile.look_in([str(PROFILES)])
    for number, name in enumerate(CODECS):
        options = (None, next(PROFILES.iterdir()).stem) if name == "klt" else ()
        stream = encode(codec.get(name, *options), raw, shape)
        assert stream, name
        yield name, bytes([number]) + len(raw).to_bytes(2, "little") + stream


if __name__ == "__main__":
    for target, files in seeds().items():
        assert target in TARGETS
        folder = HERE / "corpus" / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
