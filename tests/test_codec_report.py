"""The codec report: texts, the retrieval task, and whole runs on tiny models."""

# ruff: noqa: E402 - torch and transformers are optional
from __future__ import annotations

import gzip
import json
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tiny_models import tiny as build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmkv import chunk
from lmkv.cli import main
from lmkv.codec.report import measure as measuring
from lmkv.codec.report import model as models_
from lmkv.codec.report import plot, table, texts
from lmkv.codec.report.methods import Coded, chosen
from lmkv.codec.report.metrics import compare, log_softmax
from lmkv.codec.report.model import KV, Model, floats
from lmkv.codec.report.retrieval import FACTS, make
from lmkv.errors import BadInput, ConfigError

WORDS = "the keeper of a lamp looked over grey water and wrote what he saw in his book"


def error(one: KV, other: KV) -> float:
    return max(float(np.abs(floats(a) - floats(b)).max()) for a, b in zip(one, other, strict=True))


# Texts


def test_texts_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.md").write_text("second")
    (tmp_path / "in" / ".hidden").write_text("never")
    (tmp_path / "in" / "a.txt.gz").write_bytes(gzip.compress(b"first"))
    page = "<html><style>p{}</style><h1>Title</h1><p>One <b>bold</b> line</p><script>x=1</script></html>"
    (tmp_path / "page.html").write_text(page)
    found = texts.read([tmp_path / "in", tmp_path / "page.html"])
    assert [each.name for each in found] == ["a.txt.gz", "b.md", "page.html"]
    assert [each.text.strip() for each in found] == ["first", "second", "Title\n\nOne bold line"]


def test_texts_that_are_none(tmp_path: Path) -> None:
    cases = {
        "empty.txt": b" \n",
        "binary.bin": b"a\0b",
        "latin.txt": b"caf\xe9 au",
        "cut.gz": gzip.compress(b"x" * 99)[:-9],
    }
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ConfigError, match=name):
            texts.read([tmp_path / name])
    (tmp_path / "nothing").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "missing"):
        with pytest.raises(ConfigError, match="--texts"):
            texts.read([path])


# The retrieval task


def test_documents_have_their_length_facts_and_depths() -> None:
    task = make(lambda text: list(text.encode()), 2048, 5)
    text = bytes(task.ids).decode()
    assert len(task.ids) == 2048
    assert [question.depth for question in task.questions] == sorted(question.depth for question in task.questions)
    for question in task.questions:
        start, word = bytes(question.ids).decode().strip(), bytes(question.answer).decode()
        assert f" {start}{word}." in text
        assert text.index(start) / 2048 == pytest.approx(question.depth, abs=0.01)
        assert word.strip() in dict(FACTS)[start].split()
    assert task != make(lambda text: list(text.encode()), 2048, 6)
    with pytest.raises(ConfigError, match="too few"):
        make(lambda text: list(text.encode()), 256, 0)


# Models


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Bytes, 256 of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=4096)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: Any, tokenizer: Any, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prose(tmp_path_factory: Any) -> Path:
    """Three texts of about a thousand bytes."""
    path = tmp_path_factory.mktemp("texts")
    for seed in range(3):
        words = np.random.default_rng(seed).choice(WORDS.split(), 260)
        (path / f"{seed}.txt").write_text(" ".join(words))
    return path


@pytest.fixture
def lmkv(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(each) for each in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(exit_.value.code or 0), out, err

    return run


class Zeros:
    """Nothing comes back."""

    name, profile_bytes = "zeros", 0

    def code(self, kv: KV) -> Coded:
        return Coded(KV(np.zeros_like(kv.k), np.zeros_like(kv.v)), [0.0] * (kv.k.shape[2] // 256))


def test_the_kv_of_a_prefix_continues_as_the_whole_text(folder: Path) -> None:
    """transformers over the whole text, without any cache, expects the same but for the rounding of KV."""
    model = Model(folder, threads=1)
    ids = np.random.default_rng(12).integers(2, 256, 300)
    kv = model.prefill(ids[:256])
    mine = model.over(kv).logits(ids[256:])
    with torch.inference_mode():
        theirs = model.model(torch.from_numpy(ids[None])).logits[0, 256:].numpy()
    assert compare(log_softmax(theirs), log_softmax(mine), ids[256:]).kl.mean() < 1e-3
    short = model.prefill(ids[:128])
    assert error(short, kv.crop(128)) < 0.05  # a causal prefix is a crop


def test_negative_control(folder: Path, prose: Path) -> None:
    model = Model(folder, threads=1)
    methods = [*chosen(["raw", "zstd", "q8"], model.geometry), Zeros()]
    report = measuring.measure(model, texts.read([prose]), methods, [256, 512], 8)
    kl = {(row.method, row.prefix): row.figures("kl") for row in report.rows}
    for prefix in (256, 512):
        assert (kl["raw", prefix] == 0).all()
        assert (kl["zstd", prefix] == 0).all()
        assert 0 < kl["q8", prefix].mean() < 0.05
        assert kl["zeros", prefix].mean() > 0.3
    assert kl["q8", 256].shape == (3, 8)


def test_an_interrupted_report_has_the_texts_that_are_done(folder: Path, prose: Path) -> None:
    model = Model(folder, threads=1)
    methods = chosen(["raw", "q8"], model.geometry)

    def steps(count: int) -> Any:
        yield from measuring.schedule(3, 2)[:count]
        raise KeyboardInterrupt

    report = measuring.measure(model, texts.read([prose]), methods, [256], 4, steps(3))
    assert report.texts == ["0.txt"]
    assert [(len(row.positions), len(row.bits)) for row in report.rows] == [(1, 1)] * 2
    assert table.markdown(report)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(model, texts.read([prose]), methods, [256], 4, steps(1))


def test_every_byte_of_the_streams_is_counted(folder: Path, prose: Path) -> None:
    """Against zstd itself over the bytes of the container's parts, gathered by hand."""
    model = Model(folder, threads=1)
    kv = model.prefill(model.encode((prose / "0.txt").read_text())[:512])
    coded = chosen(["zstd"], model.geometry)[0].code(kv)
    spec, expected = model.geometry.spec, []
    for depth in range(2):
        tokens = slice(256 * depth, 256 * depth + 256)
        both = np.stack([kv.k[:, :, tokens], kv.v[:, :, tokens]], 1)  # [layers, kv, heads, tokens, dim]
        payload = [both[part.first_layer : part.first_layer + part.layers].tobytes() for part in chunk.layout(spec, 0)]
        expected.append(8 * sum(len(zstandard.ZstdCompressor(level=1).compress(each)) for each in payload))
    assert coded.bits == expected
    assert all(stored % 4096 == 0 and 8 * stored > b for stored, b in zip(coded.stored, coded.bits, strict=True))
    assert error(kv, coded.kv) == 0


def test_a_report_from_the_command_line(folder: Path, prose: Path, lmkv: Any, tmp_path: Path) -> None:
    common = ["codec", "report", folder, "--texts", prose, "--prefix", "256,512", "--continuation", 8, "--threads", 1]
    picture, page, work = tmp_path / "r.svg", tmp_path / "r.md", tmp_path / "work"
    extra = ["--codecs", "raw,zstd,fp8,q8", "--plot", picture, "--markdown", page, "--work", work, "--pca-texts", prose]
    code, out, err = lmkv(*common, *extra, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["texts"] == ["0.txt", "1.txt", "2.txt"]
    rows = {(row["method"], row["prefix"]): row for row in found["rows"]}
    wanted = {"raw", "zstd", "fp8", "q8", "kivi-2", "kivi-3", "kivi-4", "fp8-cast", "1-ulp"}
    assert {name for name, _ in rows} == wanted | {"pca-0.25", "pca-0.5", "pca-1"}
    for prefix in (256, 512):
        raw, q8 = rows["raw", prefix], rows["q8", prefix]
        assert raw["bits"] == [16.0, 16.0, 16.0]
        assert raw["kl"] == rows["zstd", prefix]["kl"] == [0, 0, 0]
        assert raw["top1"][0] == 1
        assert 8.4 < q8["bits"][0] < 9.5
        assert q8["kl"][1] <= q8["kl"][0] <= q8["kl"][2]
        assert q8["decode_gb_s"] > 0
        assert rows["kivi-4", prefix]["bits"][0] == 5.5  # V's heads are half a group wide here
        assert rows["kivi-4", prefix]["decode_gb_s"] is None
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert "kivi" in picture.read_text()
    assert all(f"| {prefix} | kivi-4 | 5.50 |" in page.read_text() for prefix in (256, 512))
    kept = list(work.iterdir())
    assert len(kept) == 3  # the longest prefix of each text, which PCA was fitted on too
    again = json.loads(lmkv(*common, *extra, "--json")[1])
    strip = ("encode_gb_s", "decode_gb_s", "copy_gb_s", "link_gbit_s")
    for one, other in zip(found["rows"], again["rows"], strict=True):
        assert {k: v for k, v in one.items() if k not in strip} == {k: v for k, v in other.items() if k not in strip}


def test_a_table_with_the_retrieval_task(folder: Path, prose: Path, lmkv: Any, tmp_path: Path) -> None:
    code, out, err = lmkv(
        "codec", "report", folder, "--texts", prose, "--prefix", "1024", "--continuation", 4, "--retrieval", 2,
        "--no-baselines", "--codecs", "q8", "--plot", tmp_path / "r.png", "--threads", 1,
    )  # fmt: skip
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["prefix", "codec", "bits/value"]
    assert [line.split()[:3] for line in lines[-2:]] == [["1024", "exact", "16"], ["1024", "q8", "16"]]
    assert [path.suffix in (".png", ".svg") for path in tmp_path.iterdir()] == [True]


def test_bad_input_is_one_clear_line(folder: Path, prose: Path, lmkv: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("only a few words")
    (tmp_path / "hollow").mkdir()
    common = ["--prefix", 256, "--continuation", 4, "--threads", 1]
    cases = [
        ((tmp_path / "none", "--texts", prose), "no model folder"),
        ((tmp_path / "hollow", "--texts", prose), "no model folder"),
        ((folder, "--texts", tmp_path / "none"), "there is no"),
        ((folder, "--texts", tmp_path / "empty.txt"), "empty.txt is empty"),
        ((folder, "--texts", tmp_path / "short.txt"), "short.txt has 16 tokens, 261 are needed"),
        ((folder, "--texts", prose, "--codecs", "zsdt"), "did you mean 'zstd'"),
        ((folder, "--texts", prose, "--codecs", "zstd:x"), "the level is a number"),
        ((folder, "--texts", prose, "--prefix", "300"), "256 would be"),
        ((folder, "--texts", prose, "--prefix", "many"), "no number of tokens"),
        ((folder, "--texts", prose, "--prefix", "8k"), "made for 4096 tokens"),
        ((folder, "--texts", prose, "--dtype", "int8"), "float32"),
        ((folder, "--texts", prose, "--profile", tmp_path / "none.lmkvp"), "profile"),
    ]  # fmt: skip
    for arguments, message in cases:
        code, out, err = lmkv("codec", "report", arguments[0], *common, *arguments[1:])
        assert (code, out) == (1, "")
        assert message in err
        assert err.count("\n") == 1


def test_models_whose_layers_differ_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    build("mistral").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="full attention"):
        Model(tmp_path)


def test_an_interrupted_save_is_not_read(folder: Path, tmp_path: Path) -> None:
    model = Model(folder, threads=1, work=tmp_path)
    ids = np.arange(2, 66)
    kv = model.prefill(ids)
    assert error(model.prefill(ids), kv) == 0
    assert len(list(tmp_path.iterdir())) == 1
    assert models_.Model(folder, threads=1).work is None


# The picture without matplotlib, and imports


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    timing = measuring.Timing(1000)
    rows = [
        measuring.Row(name, 256, 0, timing, [b], [b]) for name, b in (("klt:0", 3.0), ("klt:1", 2.0), ("raw", 16.0))
    ]
    for row, kl in zip(rows, (0.001, 0.01, 0.0), strict=True):
        figures = (np.full(4, kl), *(np.ones(4) for _ in range(3)))
        row.positions.append(measuring.Positions(*figures))
    report = measuring.Report("<tiny>", "float32", 1, ["a"], 4, rows)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    drawn = plot.draw(report, tmp_path / "p.png")
    assert drawn == tmp_path / "p.svg"
    root = ET.parse(drawn).getroot()
    assert "&lt;tiny&gt;" in drawn.read_text()
    assert sum(each.tag.endswith("circle") for each in root.iter()) == 2  # exact codecs have no place on a log scale
    assert table.summary(report)[0]["kl"] == pytest.approx((0.001, 0.001, 0.001))


def test_classes_are_the_fewest_bits_within_a_bound() -> None:
    timing = measuring.Timing(1000)
    measured = [("cachegen:1", 5.0, 0.002), ("cachegen:2", 4.0, 0.009), ("klt:0", 3.0, 0.0005), ("klt:1", 2.0, 0.0099)]
    rows = [measuring.Row(name, 256, 0, timing, [b] * 2, [b] * 2) for name, b, _ in measured]
    for row, (_, _, kl) in zip(rows, measured, strict=True):
        for factor in (0.98, 1.02):  # texts differ: the interval of klt:1 goes past 0.01
            row.positions.append(measuring.Positions(np.full(4, factor * kl), np.ones(4), np.ones(4), np.ones(4)))
    found = table.classes(measuring.Report("tiny", "float32", 1, ["a", "b"], 4, rows))
    best = {(row["class"], row["codec"]): row for row in found}
    assert ("kl<0.001", "cachegen") not in best
    assert best["kl<0.001", "klt"]["method"] == "klt:0"
    assert best["kl<0.001", "klt"]["ratio"] is None
    assert best["kl<0.01", "cachegen"]["method"] == "cachegen:2"
    assert best["kl<0.01", "klt"]["ratio"] == 0.5
    assert (best["kl<0.01", "klt"]["certain"], best["kl<0.01", "cachegen"]["certain"]) == (False, True)


def test_the_command_line_starts_without_torch() -> None:
    program = (
        "import sys, lmkv, lmkv.cli; heavy = {'torch', 'transformers', 'matplotlib'} & set(sys.modules);"
        "sys.exit(', '.join(heavy) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_calibrate_show_and_report(folder: Path, prose: Path, tokenizer: Any, lmkv: Any, tmp_path: Path) -> None:
    code, out, err = lmkv(
        "codec", "calibrate", folder, "--texts", prose, "--output", tmp_path, "--tokens", 512, "--layers", 2,
        "--threads", 1, "--json",
    )  # fmt: skip
    assert code == 0, err
    made = json.loads(out)
    (file,) = tmp_path.iterdir()
    assert file.name == f"{made['id']}.lmkvp"
    assert made["bytes"] == file.stat().st_size
    errors = [level["KL"] for level in made["levels"]]
    assert all(0 < each < 5 for each in errors)
    assert errors[0] < errors[-1]
    assert json.loads(lmkv("codec", "show", file, "--json")[1]) == made
    assert made["id"] in lmkv("codec", "show", file)[1]
    code, out, err = lmkv(
        "codec", "report", folder, "--texts", prose, "--prefix", 512, "--continuation", 8, "--threads", 1,
        "--no-baselines", "--codecs", "klt", "--profile", file, "--json",
    )  # fmt: skip
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["method"] for row in rows] == [f"klt:{level['level']}" for level in made["levels"]]
    for row in rows:
        assert row["profile_bytes"] == made["bytes"]
        assert row["bits_profile"] == pytest.approx(row["bits"][0] + made["bytes"] * 8 / 5e8)
    assert rows[0]["bits"][0] > rows[-1]["bits"][0]
    assert rows[0]["kl"][0] < rows[-1]["kl"][0]
    code, _, err = lmkv("codec", "report", folder, "--texts", prose, "--prefix", 512, "--codecs", "klt")
    assert code == 1
    assert "calibrate" in err
    other = build("llama", num_hidden_layers=3)
    other.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    code, _, err = lmkv("codec", "report", tmp_path / "other", "--texts", prose, "--prefix", 512, "--profile", file)
    assert code == 1
    assert "of another model" in err
    (tmp_path / "short.txt").write_text("a few words only, " * 5)
    two = ("--texts", prose / "0.txt", "--texts", tmp_path / "short.txt")
    code, _, err = lmkv("codec", "calibrate", folder, *two, "--output", tmp_path)
    assert code == 1
    assert "short.txt: errors are measured on texts of 321 tokens" in err


# The scripts in bench/


def script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    path = Path(__file__).parents[1] / "bench" / name
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(path), run_name="__main__")


def test_links_of_limited_rate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--layers", 2, "--heads", 2, "--dim", 32, "--tokens", 512, "--runs", 1)
    script(monkeypatch, "codec_links.py", "--codecs", "zstd,q8", "--gbit", 0.1, *small)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["zstd", "q8"]
    for line in lines[1:3]:
        _, _, gbit, raw, computed, *_ = line.split()
        assert float(gbit) == 0.1
        assert float(computed) == pytest.approx(8 * (512 * 2 * 2 * 2 * 32 * 2 + 2 * 4096) / 0.1e9 * 1e3, rel=0.01)
        assert float(raw) > 0.9 * float(computed)  # never faster than the link
    assert lines[3].endswith("of 2 as expected")
    assert [line.split()[0] for line in lines[6:]] == ["zstd", "q8"]


def test_the_bandwidth_below_which_a_codec_pays_is_of_its_speed_and_ratio() -> None:
    """4 MB instead of 16 MB, decoded in 24 ms: 12 MB are saved, which take 24 ms at 4 Gbit/s."""
    links = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "codec_links.py"))
    raw, encoded = (links["Load"]([memoryview(bytes(size))] * 2, []) for size in (8_000_000, 2_000_000))
    times = [links["Timed"](1.0, 0.128, 0.056), links["Timed"](5.0, 0.026, 0.031), links["Timed"](10.0, 0.013, 0.012)]
    rows = links["rows"]("klt:3", raw, encoded, times, 0.024)
    assert [(row["expected"], row["found"]) for row in rows] == [
        ("faster", "faster"), ("either", "slower"), ("slower", "faster")
    ]  # fmt: skip
    found = links["verdict"](raw, encoded, 0.024, rows)
    assert (found["codec"], found["bits/value"], found["decode GB/s"]) == ("klt:3", 4.0, 0.667)
    assert (found["pays below Gbit/s"], found["faster up to"], found["slower from"]) == (4.0, 10.0, 5.0)
    assert found["as expected"] == "2 of 3"


def test_quality_on_texts_that_are_there(
    folder: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = runpy.run_path(str(Path(__file__).parents[1] / "bench" / "codec_quality.py"))["SOURCES"]
    assert len({each.name for each in names}) == len(names) >= 12
    for each in names:
        (tmp_path / f"{each.name}.txt").write_text((prose / "0.txt").read_text())
    options = ("--prefix", 256, "--continuation", 4, "--codecs", "q8", "--no-baselines", "--threads", 1, "--json")
    with pytest.raises(SystemExit) as exit_:
        script(monkeypatch, "codec_quality.py", folder, tmp_path, *options)
    out, err = capsys.readouterr()
    assert exit_.value.code in (0, None), err
    assert json.loads(out)["texts"] == sorted(f"{each.name}.txt" for each in names)
    assert err.count(".txt\n") == len(names)
