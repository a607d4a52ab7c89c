"""lmkv._native against numpy, the blake3 and xxhash packages, and the operating system."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmkv import _native as native

MIB = 1 << 20
SHORT = (0, 1, 3, 4, 8, 9, 16, 17, 63, 64, 65, 128, 129, 240, 241)
LONG = (1023, 1024, 1025, 2048, 3072, 4088, 4096, 31744, 102400)
KEY, PREV = bytes(range(32)), bytes(range(100, 132))
# No deadline: a busy machine is not a failure.
UNTIMED = settings(deadline=None)
EVERY_LEVEL = settings(UNTIMED, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def slab() -> Iterator[native.Slab]:
    memory = native.Slab(4 * MIB)
    yield memory
    memory.close()


def view(slab: native.Slab, nbytes: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(native.memory(slab.address, slab.nbytes if nbytes is None else nbytes), np.uint8)


def int64(*values: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


# Hashes


@pytest.mark.parametrize("nbytes", SHORT + LONG)
def test_hashes_equal_the_reference(level: str, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).bytes(nbytes)
    assert native.blake3(data) == blake3.blake3(data).digest()
    assert native.blake3(data, KEY) == blake3.blake3(data, key=KEY).digest()
    assert native.xxh3_64(data) == xxhash.xxh3_64_intdigest(data)


@EVERY_LEVEL
@given(data=st.binary(max_size=9000), skip=st.integers(0, 70))
def test_hashes_of_any_buffer_equal_the_reference(level: str, data: bytes, skip: int) -> None:
    part = memoryview(data)[skip:]
    assert native.blake3(part) == blake3.blake3(part).digest()
    assert native.xxh3_64(part) == xxhash.xxh3_64_intdigest(part)


@pytest.mark.parametrize("chunk", [1, 16, 100, 256, 300, 768, 4096])
@pytest.mark.parametrize("chunks", [0, 1, 2, 5, 8, 17, 33])
def test_leaf_and_chain_digests_follow_their_definition(level: str, chunk: int, chunks: int) -> None:
    tokens = np.random.default_rng(chunk).integers(0, 1 << 32, chunk * chunks + chunk // 2, np.uint32)
    leaves = [blake3.blake3(tokens[i * chunk : (i + 1) * chunk].tobytes()).digest() for i in range(chunks)]
    extras = [None if i % 3 == 0 else bytes([i]) * (i % 33) for i in range(chunks)]
    assert native.leaf_digests(tokens, chunk) == leaves
    for given_extras in (None, extras):
        digest, expected = PREV, []
        for i, leaf in enumerate(leaves):
            extra = (given_extras[i] if given_extras else None) or b""
            digest = blake3.blake3(digest + leaf + extra, key=KEY).digest()
            expected.append(digest)
        assert native.chain_digests(tokens, chunk, KEY, PREV, given_extras) == expected


def test_chain_digests_refuse_wrong_arguments() -> None:
    tokens = np.zeros(64, np.uint32)
    with pytest.raises(ValueError, match="chunk_tokens"):
        native.chain_digests(tokens, 0, KEY, PREV)
    with pytest.raises(ValueError, match="key must be 32 bytes"):
        native.chain_digests(tokens, 16, KEY[:31], PREV)
    with pytest.raises(ValueError, match="prev must be 32 bytes"):
        native.chain_digests(tokens, 16, KEY, b"")
    with pytest.raises(ValueError, match="one item for each"):
        native.chain_digests(tokens, 16, KEY, PREV, [None] * 3)
    with pytest.raises(ValueError, match="more than 32 bytes"):
        native.chain_digests(tokens, 16, KEY, PREV, [None, None, None, bytes(33)])
    with pytest.raises(TypeError):
        native.leaf_digests(tokens.astype(np.int64), 16)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key must be 32 bytes"):
        native.blake3(b"", b"short")


def test_checksums_hash_each_range(slab: native.Slab) -> None:
    data = view(slab)
    data[:] = np.random.default_rng(0).integers(0, 256, data.size, np.uint8)
    offsets, lengths = int64(0, 4096, MIB, 17), int64(4088, 8192, 3 * MIB, 0)
    expected = [xxhash.xxh3_64_intdigest(data[o : o + n]) for o, n in zip(offsets, lengths, strict=True)]
    assert native.checksums(slab.address, offsets, lengths).tolist() == expected
    assert native.checksums(slab.address, int64(), int64()).tolist() == []
    for bad in ((int64(-1), int64(1)), (int64(0), int64(-1)), (int64(1), int64(2**63 - 1)), (int64(0, 1), int64(1))):
        with pytest.raises(ValueError, match=r"range|long"):
            native.checksums(slab.address, *bad)


# Copies


@st.composite
def boxes(draw: st.DrawFn) -> dict[str, Any]:
    """A plane's page as a box [n0, n1, run], with its axes in any order and padding on the engine's side."""
    n0, n1 = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    run = draw(st.sampled_from([1, 3, 32, 64, 96, 128, 256, 4096, 8192, 9000]))
    return {
        "shape": (n0, n1, run),
        "swap": draw(st.booleans()),
        "pad": draw(st.sampled_from([0, 1, 64, 128])),
        "planes": draw(st.integers(1, 3)),
        "pages": draw(st.integers(1, 12)),
        "counts": draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)),
        "first": draw(st.integers(0, 2)),
        "threads": draw(st.integers(1, 3)),
        "stream": draw(st.sampled_from([0, 1 << 40])),
        "seed": draw(st.integers(0, 1000)),
    }


def random_bytes(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return rng.integers(0, 256, shape, np.uint8)


@EVERY_LEVEL
@given(box=boxes())
def test_gather_and_scatter_equal_numpy_indexing(level: str, box: dict[str, Any]) -> None:
    rng = np.random.default_rng(box["seed"])
    (n0, n1, run), planes, pages = box["shape"], box["planes"], box["pages"]
    inner, outer = (n0, n1) if box["swap"] else (n1, n0)
    engine = random_bytes(rng, planes, pages, outer, inner * run + box["pad"])
    strides = (run, engine.strides[2]) if box["swap"] else (engine.strides[2], run)
    boxes_of = np.lib.stride_tricks.as_strided(
        engine, (planes, pages, n0, n1, run), (engine.strides[0], engine.strides[1], *strides, 1)
    )
    positions = box["first"] + 4
    payload = random_bytes(rng, len(box["counts"]), planes, positions, n0, n1, run)
    rows = [
        [
            engine.ctypes.data + p * engine.strides[0], p * payload.strides[1], engine.strides[1], payload.strides[2],
            run, n0, strides[0], payload.strides[3], n1, strides[1], payload.strides[4],
        ]
        for p in range(planes)
    ]  # fmt: skip
    plan = native.CopyPlan(np.array(rows, np.int64), payload[0].nbytes)
    assert (plan.planes, plan.bytes_per_page) == (planes, planes * n0 * n1 * run)

    starts = np.concatenate([[0], np.cumsum(box["counts"])]).astype(np.int64)
    slots = payload.ctypes.data + np.arange(len(payload), dtype=np.int64) * payload.strides[0]
    first = np.full(len(payload), box["first"], np.int64)
    # A scatter must not name a page twice, a gather may.
    for gather in (True, False) if starts[-1] <= pages else (True,):
        ids = rng.choice(pages, starts[-1], replace=starts[-1] > pages).astype(np.int64)
        old_engine, old_payload = boxes_of.copy(), payload.copy()
        native.copy_pages(plan, gather, slots, ids, starts, first, box["threads"], box["stream"])
        for i, (begin, end) in enumerate(pairwise(starts)):
            place = slice(box["first"], box["first"] + end - begin)
            if gather:
                old_payload[i, :, place] = old_engine[:, ids[begin:end]]
            else:
                old_engine[:, ids[begin:end]] = old_payload[i, :, place]
        np.testing.assert_array_equal(payload, old_payload)
        np.testing.assert_array_equal(boxes_of, old_engine)


PAGE = [1 << 20, 0, 4096, 4096, 4096, 1, 0, 0, 1, 0, 0]


def changed(**fields: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    names = ("base", "offset", "page_stride", "payload_page_stride", "run", "n0", "es0", "ps0", "n1", "es1", "ps1")
    return np.array([[fields.get(name, value) for name, value in zip(names, PAGE, strict=True)]], np.int64)


WRONG_FIELDS = [{"run": 0}, {"run": -1}, {"n0": 0}, {"n1": -3}, {"base": 0}, {"offset": -1}, {"run": 1 << 62}]
WRONG_FIELDS += [
    {"offset": 4096 * 3 + 1},
    {"n0": 2, "ps0": 4096 * 4},
    {"n0": 2, "ps0": -1},
    {"n0": 2, "es0": -(1 << 21)},
]
WRONG_FIELDS += [{"n0": 2, "es0": 1 << 62, "n1": 2, "es1": 1 << 62}, {"payload_page_stride": -4096}]
WRONG_FIELDS += [{"n0": 1 << 40, "n1": 1 << 40}, {"base": 2**63 - 4096}]


@pytest.mark.parametrize("fields", WRONG_FIELDS, ids=repr)
def test_an_impossible_plane_is_named(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="plane 0: "):
        native.CopyPlan(changed(**fields), 4 * 4096)


def test_indices_are_checked_before_a_byte_moves() -> None:
    memory = np.arange(8 * 4096, dtype=np.uint8)
    slot = np.zeros(4 * 4096, np.uint8)
    plan = native.CopyPlan(changed(base=memory.ctypes.data), slot.nbytes)
    slots, none = int64(slot.ctypes.data), int64(0)

    def copy(ids: Any, starts: Any, first: Any = none, slots: Any = slots, **options: int) -> None:
        native.copy_pages(plan, True, slots, ids, starts, first, **options)

    for wrong in (
        lambda: copy(int64(0, 1, 2, 3, 4), int64(0, 5)),  # five positions of four
        lambda: copy(int64(0, 1), int64(0, 2), int64(3)),
        lambda: copy(int64(0, 1), int64(0, 2), int64(-1)),
        lambda: copy(int64(0, -1), int64(0, 2)),
        lambda: copy(int64(0, 1 << 60), int64(0, 2)),
        lambda: copy(int64(0), int64(0, 2)),
        lambda: copy(int64(0), int64(1, 0)),
        lambda: copy(int64(0), int64(-1, 0)),
        lambda: copy(int64(0), int64(0, 1), slots=int64(0)),
        lambda: copy(int64(0), int64(0, 1), slots=int64(2**63 - 1)),
        lambda: copy(int64(0), int64(0, 1), int64(0, 0)),
        lambda: copy(int64(0), int64(0)),
        lambda: copy(int64(0), int64(0, 1), threads=0),
    ):
        with pytest.raises(ValueError, match=r"page|starts|slot|threads"):
            wrong()
    assert not slot.any()
    copy(int64(2, 1, 0, 7), int64(0, 4))
    np.testing.assert_array_equal(slot.reshape(4, 4096), memory.reshape(8, 4096)[[2, 1, 0, 7]])


def test_plans_need_eleven_columns() -> None:
    with pytest.raises(TypeError):
        native.CopyPlan(np.zeros((1, 10), np.int64), 4096)
    with pytest.raises(ValueError, match="at least one plane"):
        native.CopyPlan(np.zeros((0, 11), np.int64), 4096)


# Memory


def test_a_slab_is_aligned_zeroed_and_writable(slab: native.Slab) -> None:
    assert slab.address % (2 * MIB) == 0
    data = view(slab)
    assert data.size == slab.nbytes == 4 * MIB
    assert not data.any()
    data[5] = 7
    slab.touch(0, slab.nbytes)
    assert data[5] == 7
    native.zero(slab.address, 6)
    assert not data.any()


def test_a_slab_of_a_file_shares_its_bytes_and_refuses_a_shorter_one() -> None:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 4 * MIB)
    one, two = native.Slab(4 * MIB, True, fd), native.Slab(2 * MIB, False, fd)
    with pytest.raises(MemoryError):
        native.Slab(4 * MIB + 1, True, fd)
    os.close(fd)
    with pytest.raises(MemoryError):
        native.Slab(4096, True, fd)
    one.touch(0, one.nbytes)
    view(one)[5] = 7
    assert view(two)[5] == 7
    assert one.address % (2 * MIB) == two.address % (2 * MIB) == 0
    one.close()
    assert view(two)[5] == 7


def test_slabs_refuse_what_they_cannot_do(slab: native.Slab) -> None:
    with pytest.raises(MemoryError):
        native.Slab(1 << 60)
    with pytest.raises(ValueError, match="positive"):
        native.Slab(0)
    for start, stop in ((-1, 5), (5, 4), (0, slab.nbytes + 1)):
        with pytest.raises(ValueError, match="touch"):
            slab.touch(start, stop)
    for address, nbytes in ((0, 1), (-5, 1), (1, -1), (2**63 - 1, 2)):
        with pytest.raises(ValueError, match=r"address|range"):
            native.memory(address, nbytes)
    closed = native.Slab(4096)
    closed.close()
    closed.close()
    with pytest.raises(ValueError, match="closed"):
        closed.touch(0, 1)


# Files


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("nbytes", [4096, 64 * 1024, MIB + 4096])
def test_a_file_comes_back_as_written(
    slab: native.Slab, tmp_path: Path, nbytes: int, direct: bool, fsync: bool
) -> None:
    data = view(slab)
    data[:nbytes] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    path, tmp = tmp_path / "x", tmp_path / "tmp"
    wrote = native.write_file(str(tmp), str(path), slab.address, nbytes, direct, fsync, 64 * 1024, 3)
    if direct and wrote == -errno.EINVAL:
        pytest.skip("no O_DIRECT here")
    assert wrote == 0
    assert path.read_bytes() == data[:nbytes].tobytes()
    assert [file.name for file in tmp_path.iterdir()] == ["x"]
    at = slab.address + 2 * MIB
    assert native.read_file(str(path), at, 2 * MIB, direct, 128 * 1024, 2) == nbytes
    np.testing.assert_array_equal(data[:nbytes], data[2 * MIB : 2 * MIB + nbytes])


def test_failed_writes_leave_nothing(slab: native.Slab, tmp_path: Path) -> None:
    tmp, path = str(tmp_path / "tmp"), str(tmp_path / "x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken").write_bytes(b"other")

    def write(tmp: str, path: str) -> int:
        return native.write_file(tmp, path, slab.address, 8192, False, True)

    assert write(str(tmp_path / "taken"), path) == -errno.EEXIST
    assert write(str(tmp_path / "missing" / "tmp"), path) == -errno.ENOENT
    assert write(tmp, str(tmp_path / "missing" / "x")) == -errno.ENOENT
    assert write(tmp, str(tmp_path / "folder")) == -errno.EISDIR
    assert write(tmp, str(tmp_path / ("n" * 300))) == -errno.ENAMETOOLONG
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "taken"]
    assert (tmp_path / "taken").read_bytes() == b"other"


def test_a_full_disk_is_an_error_number(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk: the write fails half way (tests/cpp mounts a really full one)."""
    code = """
import resource, signal, sys
from lmkv import _native
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
slab = _native.Slab(1 << 20)
sys.exit(-_native.write_file(*sys.argv[1:], slab.address, 1 << 20, False, False, 4096))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tmp"), str(tmp_path / "x")]
    assert subprocess.run(command, check=False).returncode == errno.EFBIG
    assert list(tmp_path.iterdir()) == []


def test_unusable_files_are_refused(slab: native.Slab, tmp_path: Path) -> None:
    def read(path: Path, capacity: int = MIB) -> int:
        return native.read_file(str(path), slab.address, capacity, False)

    assert read(tmp_path / "missing") == -errno.ENOENT
    assert read(tmp_path) == -errno.EBADMSG
    file = tmp_path / "x"
    for nbytes in (0, 1, 4095, 4097):
        file.write_bytes(bytes(nbytes))
        assert read(file) == -errno.EBADMSG
    file.write_bytes(bytes(8192))
    assert read(file, 4096) == -errno.EFBIG
    assert read(file, 8192) == 8192
    assert native.read_file("/dev/zero", slab.address, MIB, False) == -errno.EBADMSG


def test_io_settings_are_checked(slab: native.Slab, tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    for extent in (0, -4096, 4097):
        with pytest.raises(ValueError, match="extent"):
            native.read_file(path, slab.address, 4096, False, extent)
    with pytest.raises(ValueError, match="threads"):
        native.read_file(path, slab.address, 4096, False, 4096, 0)
    with pytest.raises(ValueError, match="address"):
        native.write_file(path, path, 0, 4096, False, False)


def test_list_dir_lists_regular_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "0")
    os.mkfifo(tmp_path / "pipe")
    names = [str(i) for i in range(200)] + ["größe", "n" * 255, os.fsdecode(b"not\xffutf8")]
    for i, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(i))
    expected = [(name, (tmp_path / name).stat().st_size, (tmp_path / name).stat().st_mtime_ns) for name in names]
    assert sorted(native.list_dir(str(tmp_path))) == sorted(expected)
    with pytest.raises(FileNotFoundError) as missing:
        native.list_dir(str(tmp_path / "missing"))
    assert missing.value.filename == str(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        native.list_dir(str(tmp_path / "0"))


# Processes and threads


def test_a_forked_child_can_call_everything(slab: native.Slab, tmp_path: Path) -> None:
    memory, page = np.arange(64 * 4096, dtype=np.uint8), changed()
    page[0, 0] = memory.ctypes.data
    plan = native.CopyPlan(page, 64 * 4096)

    def use(name: str) -> bool:
        native.copy_pages(plan, True, int64(slab.address), np.arange(64), int64(0, 64), int64(0), 2, 0)
        native.chain_digests(np.zeros(65536, np.uint32), 256, KEY, PREV)
        path = str(tmp_path / name)
        wrote = native.write_file(path + ".tmp", path, slab.address, MIB, False, False, 4096, 4)
        read = native.read_file(path, slab.address, MIB, False, 4096, 4)
        slab.touch(0, slab.nbytes)
        return (wrote, read) == (0, MIB) and np.array_equal(view(slab)[: memory.size], memory)

    stop, failures = threading.Event(), []

    def keep_busy() -> None:
        while not stop.is_set():
            if not use("parent"):
                failures.append("parent")

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for i in range(8):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forking beside threads
                child = os.fork()
            if child == 0:
                signal.alarm(30)
                os._exit(0 if use(f"child{i}") else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        busy.join()
    assert failures == []


def test_cpu_features_name_the_level_in_use(level: str) -> None:
    features = native.cpu_features()
    assert features["simd"] == level
    assert int(features["cpus"]) >= 1
    with pytest.raises(ValueError, match="portable"):
        native.limit_simd("neon")
