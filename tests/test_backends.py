import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lmkv import backends
from lmkv.errors import ConfigError
from lmkv.testing import BackendTests

DOCS = Path(__file__).parent.parent / "docs" / "backends.md"


def example() -> dict[str, object]:
    """The names that the first code block of docs/backends.md defines."""
    names: dict[str, object] = {"__name__": "example"}
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert code is not None
    exec(compile(code[1], str(DOCS), "exec"), names)
    return names


class TestDocumentedBackend(BackendTests):
    """What a stranger copies from the documentation passes the suite that it recommends."""

    @pytest.fixture
    def backend(self):
        backend = example()["DictBackend"]("dict://", capacity=str(32 << 20))
        yield backend
        backend.close()

    def test_full(self):
        from lmkv.testing import container, key_of

        with_room_for_one = example()["DictBackend"]("dict://?x", capacity="4096")
        writes = [backends.Write(key_of(n), container(n, 4096)) for n in range(2)]
        assert [r.status.value for r in with_room_for_one.write(writes)] == ["ok", "full"]


class Recorder:
    def __init__(self, url, *, fsync="0", level=3):
        self.given = (url, fsync, level)


@pytest.fixture
def recorder(monkeypatch):
    class Point:
        name = "test"

        def load(self):
            return Recorder

    broken = EntryPoint("broken", "lmkv_no_such_module:Backend", "lmkv.backends")
    monkeypatch.setattr(backends, "entry_points", lambda group: [Point(), broken])


def test_open_gives_options_of_the_query_and_of_the_call(recorder):
    assert backends.open("test:///a,/b").given == ("test:///a,/b", "0", 3)
    opened = backends.open("test://host:1/p%20q?fsync=a%26b&level=1", level=9)
    assert opened.given == ("test://host:1/p%20q", "a&b", 9)
    assert backends.open("test://x?fsync=").given == ("test://x", "", 3)


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
def test_open_refuses(recorder, url, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        backends.open(url)
    assert error.value.key == "tiers.url"


def test_ours_are_registered(tmp_path):
    backend = backends.open(f"disk://{tmp_path}?fsync=1")
    assert type(backend).__name__ == "DiskBackend"
    assert backend.url == f"disk://{tmp_path}?fsync=1"
    backend.close()
