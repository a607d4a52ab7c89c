"""Codecs of tiers through the Engine: what is written where, who may read what, and what is refused at start."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cache_servers import Server
from host_clients import SCOPE, WAIT, keys, until
from memory import CHUNK, Memory, full, recurrent, spec

from lmkv import Config, ConfigError, Engine, chunk, codec
from lmkv.backends.base import Found
from lmkv.backends.disk import DiskBackend
from lmkv.codec import Meanings, Rope, base, classes, meanings, profile
from lmkv.codec.classes import Measured
from lmkv.codec.profile import Block, Description, Level, Place
from lmkv.config import TierConfig
from lmkv.server.client import Host
from lmkv.server.link import Reserved
from lmkv.tier import Tier

COUNT = 4
TOKENS = np.arange(1, COUNT * CHUNK + 1, dtype=np.int32)
SPEC = spec(full(layers=4, heads=2, dim=64))
AXES = "kv token head dim"
KNOWN = Meanings.of({SPEC.geometry_id: meanings(SPEC, AXES)})
PACKED = Meanings.of({SPEC.geometry_id: meanings(SPEC)})


@pytest.fixture
def memory() -> Memory:
    """Pages full of numbers around 1, which fp8 changes and which no exact codec halves."""
    made = Memory(SPEC)
    numbers = np.random.default_rng(2).normal(1, 0.1, made.arrays[0].size // 4)
    made.arrays[0][:] = numbers.astype("<f4").view(np.uint8).reshape(made.arrays[0].shape)
    return made


@pytest.fixture(autouse=True)
def folders() -> Iterator[None]:
    """Where profiles are looked for is the process's, not the engine's."""
    yield
    profile.look_in([*Config().profiles])


def open_engine(memory: Memory, *tiers: str, **config: object) -> Engine:
    config = {"cpu_budget": "8MiB", "cpu_touch": False, "tiers": tiers, **config}
    return Engine(memory.spec, weights="test", layout=memory.pages.layout, axes=AXES, **config)


def tier(path: Path, codec: str = "raw", **options: object) -> str:
    query = "&".join(f"{name}={value}" for name, value in {"budget": "64MiB", "codec": codec, **options}.items())
    return f"disk://{path}?{query}"


def files(folder: Path) -> list[Path]:
    return [each for each in folder.rglob("*") if each.is_file() and each.stat().st_size and each.name != "lock"]


def header(file: Path) -> chunk.Header:
    return chunk.parse(memoryview(file.read_bytes()))


def store(engine: Engine, memory: Memory) -> list[np.ndarray]:
    ids = memory.ids(len(TOKENS))
    engine.store(TOKENS, memory.pages, ids)
    assert engine.flush(10).safe
    return ids


def numbers(memory: Memory, ids: list[np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(memory.read(ids)[0]).view("<f4")


def test_a_lossy_tier_gives_back_about_what_was_stored(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tier(tmp_path, "fp8")) as engine:
        ids = store(engine, memory)
        before = numbers(memory, ids)
    assert {(header(file).codec, header(file).lossy) for file in files(tmp_path)} == {("fp8", True)}
    assert sum(file.stat().st_size for file in files(tmp_path)) < before.nbytes / 2
    memory.wipe()
    with open_engine(memory, tier(tmp_path, "fp8")) as engine:
        assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"disk": len(TOKENS)}
        error = np.abs(numbers(memory, ids) / before - 1).max()
        assert 0 < error <= 2**-4  # three bits of mantissa


def test_an_exact_reader_of_a_shared_folder_does_not_take_lossy_chunks(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tier(tmp_path, "fp8")) as lossy, open_engine(memory, tier(tmp_path)) as exact:
        ids = store(lossy, memory)
        held = files(tmp_path)
        assert len(held) == COUNT
        before = numbers(memory, ids)
        assert exact.lookup(TOKENS).tokens == len(TOKENS)
        assert exact.retrieve(TOKENS, memory.pages, ids) == (0, 0, {}, "lossy")
        assert exact.stats()["miss.lossy"] >= 1
        assert files(tmp_path) == held, "another reader may want it"
        assert "chunk 0 is lossy there, and codec = 'raw' wants it more exact" in str(exact.explain(TOKENS))
        assert exact.lookup(TOKENS).tokens == 0, "it is not found again at once"
        store(exact, memory)
        assert {header(file).codec for file in files(tmp_path)} == {"raw"}
        memory.wipe()
        lossy.clear(TOKENS, tier="cpu")
        assert lossy.retrieve(TOKENS, memory.pages, ids).reason == "error", "the files have grown"
        assert lossy.health()["ok"]
        for engine in (exact, lossy):
            engine.clear(TOKENS, tier="cpu")
            assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"disk": len(TOKENS)}
            np.testing.assert_array_equal(numbers(memory, ids), before)


def test_what_is_lossy_in_host_memory_is_not_written_to_an_exact_tier(memory: Memory, tmp_path: Path) -> None:
    exact, lossy = tmp_path / "exact", tmp_path / "lossy"
    with open_engine(memory, tier(exact), tier(lossy, "fp8")) as engine:
        ids = store(engine, memory)
        engine.clear(TOKENS, tier="cpu")
        engine.clear(TOKENS, tier="disk")
        assert files(exact) == []
        assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"disk-2": len(TOKENS)}
        assert engine.flush(10).written == {}
        assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"cpu": len(TOKENS)}
        assert engine.store(TOKENS, memory.pages, ids).skipped == COUNT
        engine.flush(10)
        assert files(exact) == []


def test_lossy_chunks_leave_host_memory_where_an_exact_tier_takes_chunks_on_eviction(
    memory: Memory, tmp_path: Path
) -> None:
    tiers = tier(tmp_path / "exact", admission="on_eviction"), tier(tmp_path / "lossy", "fp8")
    with open_engine(memory, *tiers, cpu_budget="3MiB") as engine:
        ids = store(engine, memory)
        engine.clear(TOKENS, tier="cpu")
        assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"disk-2": len(TOKENS)}
        for n in range(1, 16):
            handle = engine.store(TOKENS + 100 * n, memory.pages, ids)
            assert engine.flush(10).safe
        assert handle.stored == COUNT
        assert engine.lookup(TOKENS).tiers == {"disk-2": len(TOKENS)}
        assert not set(engine.keys(TOKENS).upto(COUNT)) & {
            header(file).key.digest for file in files(tmp_path / "exact")
        }


def test_a_lossy_class_takes_only_what_is_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, "MEASURED", (Measured("fp8", 0, 8.0, 0.004), Measured("q8", 0, 8.5, 0.0005)))
    for name, chosen in (("exact", classes.LOSSLESS), ("kl<0.001", "q8"), ("kl<0.01", "fp8"), ("kl<0.05", "fp8")):
        found, limit = classes.choose(TierConfig(url="disk:///x", codec=name))
        assert (found.name, limit) == (chosen, classes.BOUNDS[name])
    made = chunk.new_header(SPEC, keys(1)[0])
    lossy = chunk.Header(**{**vars(made), "flags": chunk.LOSSY, "codec": "fp8"})
    assert (classes.error(made), classes.error(lossy)) == (0.0, 0.004)
    for name, level in (("raw", 0), ("fp8", 9), ("other", 0), ("klt", 0)):
        unknown = chunk.Header(**{**vars(lossy), "codec": name, "level": level, "profile": "0123456789abcdef"})
        assert classes.error(unknown) == math.inf


@pytest.fixture
def geometric(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A codec `kch` that needs geometry, whatever ours needs."""
    monkeypatch.setitem(base.BUILT_IN, "kch", f"{__name__}:Geometric")
    monkeypatch.setitem(base.BUILT_IN, "gone", "no_such_module:X")
    base._known.cache_clear()
    base._decoder.cache_clear()
    yield
    base._known.cache_clear()
    base._decoder.cache_clear()


class Geometric(codec.Codec):
    name, exact, needs = "kch", False, "geometry"

    def __init__(self, level: int | None = None) -> None:
        super().__init__(level or 0)

    def encode(self, src: memoryview, dst: memoryview, shape: codec.Shape | None = None) -> int:
        assert shape is not None
        assert shape.axes
        dst[:16] = bytes(16)
        return 16

    def decode(self, src: memoryview, dst: memoryview) -> None:
        dst[:] = bytes(len(dst))


@pytest.mark.usefixtures("geometric")
def test_a_codec_that_is_told_too_little_is_refused_at_start(memory: Memory, tmp_path: Path) -> None:
    urls = [tier(tmp_path / "one"), tier(tmp_path / "two", "kch")]
    with pytest.raises(ConfigError) as caught:
        Engine(SPEC, weights="test", layout=memory.pages.layout, cpu_budget="8MiB", tiers=urls)
    assert caught.value.key == "tiers.1.codec"
    assert "kch must know how pages are laid out, which it is not told here; these work: " in str(caught.value)
    works = str(caught.value).rpartition(": ")[2].split(", ")
    assert {"raw", "zstd", "fp8", "q8"} <= set(works)
    assert not {"kch", "gone"} & set(works)
    for name, known, message in (
        ("gone", None, "tiers.0.codec: 'gone' cannot be loaded"), ("fp9", None, "did you mean 'fp8'"),
        ("kl<0.02", None, "did you mean 'kl<0.0"), ("fp8", Meanings(), "fp8 must know the dtype"),
        ("kch&level=1&profile=/nowhere.lmkvp", None, "tiers.0.profile: "), ("exact&level=1", None, "tiers.0.level: "),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            classes.choose(Config.load(env={}, tiers=tier(tmp_path, name)).tiers[0], known)
    with open_engine(memory, tier(tmp_path / "two", "kch")) as engine:
        store(engine, memory)
    assert {header(file).codec for file in files(tmp_path / "two")} == {"kch"}


def test_groups_that_a_codec_has_no_use_for_stay_raw(tmp_path: Path) -> None:
    mixed = Memory(spec(full(layers=4, heads=2, dim=64), recurrent(state_bytes=32768)))
    mixed.arrays[0][:] = np.float32(1.5).tobytes() * (mixed.arrays[0].size // 4) and 0
    with open_engine(mixed, tier(tmp_path, "fp8")) as engine:
        engine.store(TOKENS, mixed.pages, mixed.ids(len(TOKENS)))
        engine.flush(10)
        assert engine.stats()["disk.encode.raw"] == COUNT
    assert {(header(file).key.group, header(file).codec) for file in files(tmp_path)} == {(0, "fp8"), (1, "raw")}


def test_a_container_that_cannot_be_decoded_here_is_left_for_others(memory: Memory, tmp_path: Path) -> None:
    with open_engine(memory, tier(tmp_path, "zstd")) as engine:
        memory.arrays[0][:] = 0
        ids = store(engine, memory)
    for file in files(tmp_path):
        view = memoryview(bytearray(file.read_bytes()))
        chunk.write_header(view, chunk.Header(**{**vars(chunk.parse(view)), "codec": "nobodys"}))
        file.write_bytes(view)
    with open_engine(memory, tier(tmp_path)) as engine:
        until(lambda: engine.stats().get("scanned_objects") == COUNT)
        assert engine.retrieve(TOKENS, memory.pages, ids).reason == "codec"
        assert "in a codec that is not known here" in str(engine.explain(TOKENS))
    assert len(files(tmp_path)) == COUNT


def test_a_codec_that_fails_leaves_the_chunk_raw(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise RuntimeError("broken")

    with open_engine(memory, tier(tmp_path, "fp8")) as engine:
        monkeypatch.setattr(engine.storage.tiers[0].codec, "encode", broken)
        store(engine, memory)
        assert engine.stats()["disk.encode.failed"] == COUNT
    assert {(header(file).codec, header(file).lossy) for file in files(tmp_path)} == {("raw", False)}


def test_a_server_keeps_containers_as_its_engines_encoded_them(memory: Memory, tmp_path: Path) -> None:
    server = Server(tmp_path, tiers=f"disk://{tmp_path}/below")
    with closing(server):
        url = f"lmkv://{server.address}"
        with open_engine(memory, f"{url}?codec=fp8") as engine:
            ids = store(engine, memory)
            before = numbers(memory, ids)
            stored = engine.storage.tiers[0].backend.usage().used
            assert 0 < stored < before.nbytes / 2
        memory.wipe()
        with open_engine(memory, url) as engine:
            assert engine.retrieve(TOKENS, memory.pages, ids).reason == "lossy"
        with open_engine(memory, f"{url}?codec=fp8") as engine:
            assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"lmkv": len(TOKENS)}
            assert np.abs(numbers(memory, ids) / before - 1).max() <= 2**-4
        server.end()
        assert {header(file).codec for file in files(tmp_path / "below")} == {"fp8"}
        server.start()
        memory.wipe()
        with open_engine(memory, f"{url}?codec=fp8") as engine:
            assert engine.retrieve(TOKENS, memory.pages, ids).tiers == {"lmkv": len(TOKENS)}
            assert np.abs(numbers(memory, ids) / before - 1).max() <= 2**-4


def test_the_host_service_is_told_what_payload_means_and_keeps_the_first_clients_codec(
    memory: Memory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"cpu_budget": "8MiB", "cpu_touch": False, "close_timeout": 2.0}
    first = Config.load(env={}, **config, tiers=[tier(tmp_path / "disk", "fp8")])
    second = Config.load(env={}, **config, tiers=[tier(tmp_path / "disk")])
    socket, nbytes = f"{tmp_path}/s", chunk.container_bytes(SPEC, 0)
    known = {SPEC.geometry_id: meanings(SPEC, AXES)}
    with (
        closing(Host(socket, config=first, linger=0.1)) as host,
        closing(Host(socket, config=second, linger=0.1)) as other,
    ):
        host.register([nbytes], WAIT, known)
        other.register([nbytes], WAIT, known)
        assert "tiers.0.codec is fp8, not raw" in caplog.text
        (slot,) = other.reserve("me", [(keys(1)[0], nbytes)], 10.0)
        assert isinstance(slot, Reserved)
        view, made = slot.view(), chunk.new_header(SPEC, keys(1)[0])
        view[chunk.PAGE :] = np.full((nbytes - chunk.PAGE) // 4, 1.5, "<f4").tobytes()
        chunk.write_header(view, made)
        assert other.commit([slot]) == [True]
        assert other.flush(10.0)
    (file,) = files(tmp_path / "disk")
    assert (header(file).codec, header(file).key.scope) == ("fp8", SCOPE)


def test_two_layouts_of_one_geometry_leave_only_the_dtype_certain() -> None:
    made = Meanings.of({1: meanings(SPEC, AXES)})
    made.add({1: meanings(SPEC, AXES), 2: meanings(SPEC)})
    assert [each.axes for each in made] == [AXES, ""]
    made.add({1: meanings(SPEC, "head token kv dim")})
    assert [(each.axes, each.dtype) for each in made] == [("", "float32"), ("", "float32")]


def test_packed_pages_get_the_codecs_that_were_measured_without_axes() -> None:
    for name, chosen in (("kl<0.001", classes.LOSSLESS), ("kl<0.01", "fp8")):
        codec_of_packed, _ = classes.choose(TierConfig(url="disk:///x", codec=name), PACKED)
        assert codec_of_packed.name == chosen
    assert classes.choose(TierConfig(url="disk:///x", codec="kl<0.001"), KNOWN).codec.name == "q8"
    assert classes.choose(TierConfig(url="disk:///x", codec="exact"), Meanings()).codec.name == "raw"


def made_up(together: int = 1, **changes: object) -> profile.Profile:
    """Of four layers, in blocks of so many; what it transforms comes back."""
    width = together * 2 * (64 + 64)
    ones = np.ones(width, np.float32)
    arrays = np.zeros(width, np.float32), ones, ones / (1 << 14), (1 << 14) * np.eye(width, dtype=np.int16)
    firsts = range(0, 4, together)
    places = [Place(first_layer=n, layers=together, first_head=0, heads=2, kv="kv", kept=width) for n in firsts]
    levels = [Level(0.01, 6.0, 0.0002), Level(0.1, 3.0, 0.004), Level(0.2, 2.0, 0.008), Level(0.5, 1.0, None)]
    about = Description(
        model="m", dtype="float32", layers=4, heads=2, dim=64, dim_v=64, sinks=4, levels=tuple(levels),
        blocks=tuple(places),
    )  # fmt: skip
    about = msgspec.structs.replace(about, **changes)
    return profile.make(about, tuple(Block(place, *arrays, np.zeros((4, width), np.uint8)) for place in places))


def test_a_class_takes_the_coarsest_level_that_was_measured_within_it_on_the_model(tmp_path: Path) -> None:
    made = made_up()
    file = made.save(tmp_path / "profiles")
    for name, level in (("kl<0.001", 0), ("kl<0.01", 2), ("kl<0.05", 2)):
        chosen, _ = classes.choose(TierConfig(url="disk:///x", codec=name, profile=str(file)), KNOWN)
        assert (chosen.name, chosen.level, chosen.profile) == ("klt", level, made.id)
    header = chunk.Header(**{**vars(chunk.new_header(SPEC, keys(1)[0])), "flags": chunk.LOSSY, "codec": "klt"})
    errors = [classes.error(chunk.Header(**{**vars(header), "level": n, "profile": made.id})) for n in range(5)]
    assert errors == [0.0002, 0.004, 0.008, math.inf, math.inf]
    assert classes.choose(TierConfig(url="disk:///x", codec="kl<0.01", profile=made.id), PACKED).codec.name == "fp8"
    other = Meanings.of({1: meanings(spec(full(layers=4, heads=4, dim=64)), AXES)})
    with pytest.raises(ConfigError, match=r"tiers\.0\.profile: m caches \(2, 64, 64\)"):
        classes.choose(TierConfig(url="disk:///x", codec="klt", profile=made.id), other)
    with pytest.raises(ConfigError, match=r"tiers\.0\.profile: the codec klt needs one"):
        classes.choose(TierConfig(url="disk:///x", codec="klt"), KNOWN)


def test_a_profile_whose_blocks_cross_the_parts_of_a_chunk_is_refused_at_start(tmp_path: Path) -> None:
    """A layer of 1,024 tokens takes a MiB, and so has a part of its own."""
    long = spec(full(layers=4, heads=2, dim=64, page=64), chunk=1024)
    assert [part.layers for part in chunk.layout(long, 0)] == [1, 1, 1, 1]
    assert [part.layers for part in chunk.layout(SPEC, 0)] == [4]
    pairs = str(made_up(2).save(tmp_path))
    known = Meanings.of({long.geometry_id: meanings(long, AXES)})
    for name in ("klt", "kl<0.01"):
        wanted = TierConfig(url="disk:///x", codec=name, profile=pairs)
        assert classes.choose(wanted, KNOWN).codec.name == "klt"
        with pytest.raises(ConfigError, match=r"^tiers\.2\.profile: .*up to 2 layers .*--chunk-tokens 1024"):
            classes.choose(wanted, known, "tiers.2")
        single = TierConfig(url="disk:///x", codec=name, profile=str(made_up(1).save(tmp_path)))
        assert classes.choose(single, known).codec.name == "klt"
    settings = {"cpu_budget": "64MiB", "cpu_touch": False, "tiers": [tier(tmp_path / "disk", "klt", profile=pairs)]}
    with pytest.raises(ConfigError, match=r"^tiers\.0\.profile: .*--chunk-tokens 1024"):
        Engine(long, weights="test", axes=AXES, **settings)


def test_a_profile_of_other_layers_or_another_rope_is_refused_at_start(tmp_path: Path) -> None:
    def reason(made: profile.Profile, **changes: object) -> str:
        here = [replace(each, **changes) for each in KNOWN]
        wanted = TierConfig(url="disk:///x", codec="klt", profile=str(made.save(tmp_path)))
        try:
            classes.choose(wanted, Meanings.of({1: here}))
        except ConfigError as error:
            return str(error)
        return ""

    turned = made_up(inv_freq=(1.0, 0.125))
    assert reason(made_up(), layers=4) == reason(made_up(), layers=0) == ""
    assert "m has 4 layers that cache alike, here are 2" in reason(made_up(), layers=2)
    for rope in (None, Rope((1.0, 0.125000001))):
        assert reason(turned, rope=rope) == reason(made_up(), rope=rope) == ""
    for rope in (Rope((1.0, 0.12)), Rope((1.0, 0.125), True), Rope((1.0, 0.125), False, 1.1), Rope((1.0,))):
        assert "rotates its keys by other angles" in reason(turned, rope=rope)
    assert reason(made_up(), dtype="bfloat16") == ""
    assert "float8_e4m3fn" in reason(made_up(), dtype="float8_e4m3fn")


def test_a_later_engine_is_held_to_the_profile_of_a_class_too(tmp_path: Path) -> None:
    wanted = TierConfig(url=f"disk://{tmp_path}/disk", codec="kl<0.01", profile=str(made_up().save(tmp_path)))
    opened = Tier(3, "disk", wanted, KNOWN)
    with closing(opened.backend):
        opened.check(KNOWN)
        opened.check(PACKED)
        with pytest.raises(ConfigError, match=r"^tiers\.2\.profile: m has 4 layers"):
            opened.check(Meanings.of({1: [replace(each, layers=2) for each in KNOWN]}))


def test_profiles_are_found_in_the_folders_that_are_set_and_missed_elsewhere(memory: Memory, tmp_path: Path) -> None:
    test_a_class_takes_the_coarsest_level_that_was_measured_within_it_on_the_model(tmp_path)
    (file,) = (tmp_path / "profiles").iterdir()
    folders = {"profiles": [str(tmp_path / "profiles")]}
    with open_engine(memory, tier(tmp_path / "disk", "klt", profile=file.stem, level=0), **folders) as engine:
        ids = store(engine, memory)
        before = numbers(memory, ids)
    assert {(header(each).codec, header(each).profile) for each in files(tmp_path / "disk")} == {("klt", file.stem)}
    memory.wipe()
    with open_engine(memory, tier(tmp_path / "disk", "kch"), **folders) as engine:
        assert engine.retrieve(TOKENS, memory.pages, ids).tokens == len(TOKENS)
        assert np.abs(numbers(memory, ids) - before).max() < 0.01
    held = files(tmp_path / "disk")
    with open_engine(memory, tier(tmp_path / "disk", "kch"), profiles=[str(tmp_path / "none")]) as engine:
        assert engine.retrieve(TOKENS, memory.pages, ids).reason == "profile"
        assert "its codec's profile is not here" in str(engine.explain(TOKENS))
    assert files(tmp_path / "disk") == held


def test_a_scan_does_not_bring_back_what_was_of_no_use_here(
    memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(memory, tier(tmp_path / "disk", "kch")) as engine:
        ids = store(engine, memory)
    real, go_on = DiskBackend.scan, threading.Event()

    def scan(self: DiskBackend) -> Iterator[list[Found]]:
        found = [each for batch in real(self) for each in batch]
        assert go_on.wait(10)
        yield found

    monkeypatch.setattr(DiskBackend, "scan", scan)
    with open_engine(memory, tier(tmp_path / "disk", "raw")) as engine:
        assert engine.retrieve(TOKENS, memory.pages, ids).reason == "lossy"
        go_on.set()
        assert engine.storage.tiers[0].scanned.wait(10)
        assert engine.lookup(TOKENS).tokens == 0


def test_what_was_measured_can_be_had() -> None:
    for each in classes.MEASURED:
        made = codec.get(each.codec, each.level)
        assert (made.exact, made.level) == (False, each.level)
        assert made.needs in ("dtype", each.needs)
