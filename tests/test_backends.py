import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from lmkv import backends
from lmkv.errors import ConfigError
from lmkv.testing import BackendTests, container, key_of

DOCS = Path(__file__).parent.parent / "docs" / "backends.md"


def example() -> dict[str, Any]:
    """The names that the first code block of docs/backends.md defines."""
    names: dict[str, Any] = {"__name__": "example"}
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], str(DOCS), "exec"), names)
    return names


class TestDocumentedBackend(BackendTests):
    """What a stranger copies from the documentation passes the suite that it recommends."""

    @pytest.fixture
    def backend(self) -> Iterator[backends.Backend]:
        backend = example()["DictBackend"]("dict://", capacity=str(32 << 20))
        yield backend
        backend.close()

    def test_full(self) -> None:
        room_for_one = example()["DictBackend"]("dict://", capacity="4096")
        writes = [backends.Write(key_of(n), container(n, 4096)) for n in range(2)]
        assert [r.status.value for r in room_for_one.write(writes)] == ["ok", "full"]


class Recorder:
    def __init__(self, url: str, *, fsync: str = "0", level: int = 3) -> None:
        self.given = (url, fsync, level)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "test"

        def load(self) -> type[Recorder]:
            return Recorder

    broken = EntryPoint("broken", "lmkv_no_such_module:Backend", "lmkv.backends")
    monkeypatch.setattr(backends, "entry_points", lambda group: [Point(), broken])


def test_open_gives_options_of_the_query_and_of_the_call(recorder: None) -> None:
    def given(url: str, **options: object) -> object:
        return vars(backends.open(url, **options))["given"]

    assert given("test:///a,/b") == ("test:///a,/b", "0", 3)
    assert given("test://h:1/p%20q?fsync=a%26b&level=1", level=9) == ("test://h:1/p%20q", "a&b", 9)
    assert given("test://x?fsync=") == ("test://x", "", 3)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("tset://x", "no backend 'tset'; did you mean 'test'?"),
        ("redis://x", "no backend 'redis'; known: broken, test"),
        ("/just/a/path", "no backend '/just/a/path'; known"),
        ("test://x?fsinc=1", "no option 'fsinc'; did you mean 'fsync'?"),
        ("test://x?url=y", "no option 'url'; known: fsync, level"),
        ("test://x?fsync=1&fsync=0", "given twice"),
        ("test://x?fsync", "bad query field"),
        ("broken://x", "lmkv_no_such_module"),
    ],
)
def test_open_refuses(recorder: None, url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        backends.open(url)
    assert error.value.key == "tiers.url"


def test_ours_are_registered(tmp_path: Path) -> None:
    backend = backends.open(f"disk://{tmp_path}?fsync=1")
    assert type(backend).__name__ == "DiskBackend"
    assert backend.url == f"disk://{tmp_path}?fsync=1"
    backend.close()


def test_a_password_in_a_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        backends.open("redis://user:hush@127.0.0.1:1?bad=1")
    assert "hush" not in str(caught.value)
