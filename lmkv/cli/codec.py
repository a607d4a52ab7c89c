"""``lmkv codec``: make a profile of a model, measure codecs on it, look at a profile. torch is loaded when they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import print_json

from lmkv.cli.output import Json, emit, track
from lmkv.errors import ConfigError

if TYPE_CHECKING:
    from lmkv.codec.profile import Profile
    from lmkv.codec.report.methods import Method
    from lmkv.codec.report.model import Model

app = typer.Typer(no_args_is_help=True, help="Codecs of a model's KV: calibrate, report, show.")

Folder = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, Llama or Qwen style.")]
Texts = Annotated[list[str], typer.Option(metavar="PATH", help="A text file or a folder of them; may be repeated.")]
Dtype = Annotated[str, typer.Option(help="Of weights and arithmetic: float32, bfloat16, float16.")]
Threads = Annotated[int, typer.Option(min=0, help="Of torch; 0: as torch likes.")]
Work = Annotated[str, typer.Option(metavar="FOLDER", help="Keep the KV of prefixes there, to be used again.")]


@app.command()
def report(
    model: Folder,
    texts: Texts,
    codecs: Annotated[
        str, typer.Option(metavar="NAMES", help="As in klt:3,kch,zstd; empty: all, the lossy ones at each level.")
    ] = "",
    profile: Annotated[str, typer.Option(metavar="FILE_OR_ID", help="For the codecs that need one.")] = "",
    prefix: Annotated[str, typer.Option(metavar="TOKENS", help="Prefix lengths.")] = "1k,2k,6k",
    continuation: Annotated[int, typer.Option(min=1, help="Tokens read after each prefix.")] = 64,
    retrieval: Annotated[int, typer.Option(min=0, help="Documents of the retrieval task; 0: leave it out.")] = 0,
    baselines: Annotated[bool, typer.Option(help="Also simulate KIVI, an fp8 cast and noise of one ulp.")] = True,
    pca_texts: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="Other texts, to fit plain PCA on; may be repeated.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw size against error: .png or .svg.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the tables as Markdown.")] = None,
    dtype: Dtype = "float32",
    threads: Threads = 0,
    work: Work = "",
    json: Json = False,
) -> None:
    """Bits a value, KL, top-1 agreement and perplexity change of every codec on a model and texts of one's own."""
    from lmkv.codec.report import table
    from lmkv.codec.report.measure import ask, check, measure, schedule
    from lmkv.codec.report.model import Model
    from lmkv.codec.report.texts import read

    found, lengths = read(texts), _lengths(prefix)
    others = read(pca_texts) if pca_texts else []
    runner = Model(model, dtype, threads, work or None)
    check(runner, lengths, continuation)
    methods = _methods(runner, [word for word in codecs.split(",") if word], profile, baselines)
    methods += _pca(runner, [each.text for each in others], max(lengths))
    steps = track(schedule(len(found), len(methods)), "texts")
    result = measure(runner, found, methods, lengths, continuation, steps)
    if retrieval:
        asked = track(schedule(retrieval, len(methods) + 1), "retrieval")
        result.answers, result.depths = ask(runner, methods, min(lengths), retrieval, asked)
    if markdown:
        markdown.write_text(table.markdown(result), encoding="utf-8")
    if plot:
        from lmkv.codec.report.plot import draw

        drawn = draw(result, plot)
        if drawn != plot and not json:
            print(f"there is no matplotlib: drawn as {drawn}")
    if json:
        print_json(data=table.as_json(result))
        return
    emit(table.cells(result))
    print()
    emit(table.class_cells(result))
    if result.answers:
        print()
        emit(table.retrieval_cells(result))


def _lengths(text: str) -> list[int]:
    """``1k,512`` as tokens."""
    found = []
    for word in text.split(","):
        number = word.strip().lower()
        count = number.removesuffix("k")
        if not count.isdigit():
            raise ConfigError("--prefix", f"{word!r} is no number of tokens: 1k,2k,6k or 1024,2048")
        found.append(int(count) * (1024 if number.endswith("k") else 1))
    return found


def _methods(model: Model, names: list[str], profile: str, baselines: bool) -> list[Method]:
    from lmkv.codec.report.baselines import Cast, Jitter, Kivi
    from lmkv.codec.report.methods import chosen

    identity, nbytes = "", 0
    if profile:
        opened = _profile(profile)
        identity, nbytes = opened.id, opened.nbytes
        about, mine = opened.description, model.geometry.meaning
        layers = len(model.geometry.spec.groups[0].layers)
        if (about.layers, about.heads, about.dim, about.dim_v) != (layers, mine.heads, mine.dim, mine.dim_v):
            raise ConfigError("--profile", f"{identity} is of another model, {about.model}: its layers or heads differ")
    methods: list[Method] = [*chosen(names, model.geometry, identity, nbytes)]
    if baselines:
        methods += [Kivi(4), Kivi(3), Kivi(2), Cast(), Jitter()]
    return methods


def _pca(model: Model, texts: list[str], tokens: int) -> list[Method]:
    """Plain PCA at a few steps, fitted on the beginnings of ``texts``."""
    if not texts:
        return []
    from lmkv.codec.report.baselines import Pca

    if model.geometry.meaning.dim != model.geometry.meaning.dim_v:
        raise ConfigError("--pca-texts", "plain PCA is for models whose K and V have one width")
    first = Pca(0.25, model.geometry.meaning.rope)
    first.fit(model.prefill(model.encode(text)[: min(tokens, 1024)]) for text in texts)
    return [first, *(first.like(step) for step in (0.5, 1.0))]


def _profile(name: str) -> Profile:
    """A profile by file or id, which codecs find from now on."""
    from lmkv.codec.profile import look_in, open_profile
    from lmkv.config import Config

    look_in(list(Config.load().profiles))
    return open_profile(name)


@app.command()
def calibrate(
    model: Folder,
    texts: Texts,
    output: Annotated[
        str, typer.Option(metavar="FOLDER", help="Empty: the first folder of the setting `profiles`.")
    ] = "",
    tokens: Annotated[int, typer.Option(min=64, help="Read of each text.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Coded together in a block.")] = 3,
    heads: Annotated[int, typer.Option(min=0, help="Coded together in a block; 0: all.")] = 0,
    joint: Annotated[bool, typer.Option(help="K and V in one block.")] = True,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Of the engine: blocks do not cross a chunk's parts.")] = 256,
    errors: Annotated[bool, typer.Option(help="Measure each level's error, on every fourth text.")] = True,
    dtype: Dtype = "float32",
    threads: Threads = 0,
    work: Work = "",
    json: Json = False,
) -> None:
    """Make a profile of a model, for the codec klt: read texts, write one file named by its own digest."""
    from lmkv.codec.calibrate import calibrate as fit
    from lmkv.codec.report.levels import apart, error_of
    from lmkv.codec.report.model import Model
    from lmkv.codec.report.texts import read
    from lmkv.config import Config

    found = read(texts)
    fitted, measured = apart(found) if errors else (found, [])
    runner = Model(model, dtype, threads, work or None)
    inputs = [runner.tensor(runner.encode(each.text)[: min(tokens, runner.max_tokens)]) for each in fitted]
    if not any(len(each) >= 64 for each in inputs):
        raise ConfigError("--texts", "none of the texts to learn from has 64 tokens")
    made = fit(
        runner.model, inputs, rope=runner.geometry.meaning.rope, name=runner.name, chunk_tokens=chunk_tokens,
        layers=layers, heads=heads, joint=joint, measure=error_of(runner, measured) if measured else None,
    )  # fmt: skip
    path = made.save(output or Config.load().profiles[0])
    if not json:
        print(path)
    _show(made, json)


@app.command()
def show(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="A profile's file, or its id.")], json: Json = False
) -> None:
    """What a profile is of, its size, and the bits and error of its levels."""
    _show(_profile(profile), json)


def _show(found: Profile, json: bool) -> None:
    about = found.description
    facts: dict[str, Any] = {"id": found.id, "bytes": found.nbytes, "model": about.model, "dtype": about.dtype}
    facts |= {"layers": about.layers, "heads": about.heads, "dim": about.dim, "dim_v": about.dim_v}
    facts |= {"sinks": about.sinks, "rotary channels": 2 * len(about.inv_freq), "blocks": len(about.blocks)}
    facts["largest block"] = max(len(each.mean) for each in found.blocks)
    levels = [
        {"level": number, "bits/value": each.bits, "KL": each.kl, "step": each.step}
        for number, each in enumerate(about.levels)
    ]
    if json:
        print_json(data=facts | {"levels": levels})
        return
    emit([{"profile": name, "": str(value)} for name, value in facts.items()])
    print()
    rows = [{name: value if name == "level" else _short(value) for name, value in row.items()} for row in levels]
    emit(rows)


def _short(x: float | None) -> str:
    return "not measured" if x is None else f"{x:.4g}"
