"""A second architecture: a small Qwen3 (grouped heads, QK-norm) is trained here, calibrated, and held to the classes.

    python bench/second_architecture.py .cache/qwen3-tiny

It reads bytes of topics of Python's `help()`, a page of 256 told again and again: after the first time each byte is
sure for who looks back a page, so an error of the cache shows. Model, profile and figures come from different topics.
What `lmkv.codec.classes` picks for each error class must keep its bound; the same profile with the channels of its
transforms mixed up must not. A model that is in the folder already is used again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lmkv.cli import main as command
from lmkv.cli.output import emit
from lmkv.codec import Meanings, classes, profile
from lmkv.codec.profile import Profile
from lmkv.codec.report.model import Model
from lmkv.config import TierConfig

CALIBRATE = ("assignment", "formatstrings", "import", "naming", "operator-summary", "typesmapping")
FRESH = ("debugger", "comparisons", "try", "numeric-types")
PAGES = 2  # of each of those topics
PAGE, TOKENS = 256, 2 * 256 + 128  # bytes
MIXED = "mixed up"


def pages(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pages of topics, told again and again up to ``TOKENS`` bytes and some, by name."""
    for name in names:
        text = topics[name].encode("ascii", "ignore").decode()
        for number in range(PAGES):
            at = (1 + 2 * number) * len(text) // (2 * PAGES)
            yield f"{name}-{number}", text[at : at + PAGE] * (TOKENS // PAGE + 1)


def corpus() -> torch.Tensor:
    """The bytes to learn from: topics that share no longer line with the others."""
    kept = {line for name in (*CALIBRATE, *FRESH) for line in topics[name].splitlines() if len(line) > 50}
    texts = (text for name, text in topics.items() if name not in (*CALIBRATE, *FRESH))
    joined = "\n".join(text for text in texts if kept.isdisjoint(text.splitlines()))
    return torch.tensor(list(joined.encode("ascii", "ignore")))


def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, by its number."""
    letters = {ord(c): c for c in pre_tokenizers.ByteLevel.alphabet()}
    spare = iter(sorted(number for number in letters if number > 255))
    order = [letters.get(byte) or letters[next(spare)] for byte in range(256)]
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(order)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def model(hidden: int, layers: int) -> Qwen3ForCausalLM:
    """4 query heads on 2 of keys and values, 32 wide."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=TOKENS,
        initializer_range=hidden**-0.5, rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def train(net: Qwen3ForCausalLM, data: torch.Tensor, steps: int) -> None:
    """A page a step."""
    draw = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3, (0.9, 0.98), weight_decay=0.05)
    ramp = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: min((n + 1) / 50, 0.02 + 0.49 * (1 + math.cos(math.pi * n / steps)))
    )
    net.train()
    for step in range(steps):
        start = int(torch.randint(len(data) - PAGE, (1,), generator=draw))
        window = data[start : start + PAGE].repeat(3)[None, :TOKENS]
        loss = net(input_ids=window, labels=window).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ramp.step()
        if step % 100 == 99:
            print(f"step {step + 1} of {steps}: {float(loss.detach()):.2f}", file=sys.stderr)
    net.eval()


def learn(folder: Path, hidden: int = 192, layers: int = 5, steps: int = 700) -> dict[str, float]:
    """Train a model, and put it, its tokenizer and the other texts into ``folder``.

    Its loss on fresh pages, nats a byte: first, as they are told first; again, from then on; and what the bytes' own
    frequencies come to.
    """
    net = model(hidden, layers)
    train(net, corpus(), steps)
    net.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    for part, names in (("calibrate", CALIBRATE), ("fresh", FRESH)):
        (folder / part).mkdir(exist_ok=True)
        for name, text in pages(names):
            (folder / part / f"{name}.txt").write_text(text, encoding="utf-8")
    fresh = torch.tensor([list(text[:TOKENS].encode()) for _, text in pages(FRESH)])
    shares = fresh.flatten().bincount() / fresh.numel()
    with torch.no_grad():
        logits = net(fresh).logits[:, :-1].log_softmax(-1)
    nats = -logits.gather(2, fresh[:, 1:, None])[..., 0]
    frequencies = float(-torch.special.xlogy(shares, shares).sum())
    return {"frequencies": frequencies, "first": float(nats[:, :PAGE].mean()), "again": float(nats[:, PAGE:].mean())}


def lmkv(*arguments: object) -> Any:
    """What a command prints as JSON."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        command([*map(str, arguments), "--threads", "1", "--json"])
    return json.loads(out.getvalue())


def mixed_up(sound: Profile) -> Profile:
    """It says of itself what the sound one does, and puts each channel where another one belongs."""
    blocks = tuple(replace(block, matrix=block.matrix[::-1].copy()) for block in sound.blocks)
    return profile.make(sound.description, blocks)


def held(folder: Path) -> list[dict[str, Any]]:
    """Calibrate the model in ``folder``, and measure on its fresh texts what each class comes to, beside two codecs
    without a profile. KL high: of the 95 % interval."""
    made = lmkv("codec", "calibrate", folder, "--texts", folder / "calibrate", "--output", folder)
    sound = profile.open_profile(str(folder / f"{made['id']}.lmkvp"))
    mixed = profile.open_profile(str(mixed_up(sound).save(folder)))
    meanings = Meanings.of({1: [Model(folder, threads=1).geometry.meaning]})
    rows: list[dict[str, Any]] = []
    for mine, title in ((sound, ""), (mixed, MIXED)):
        asked: dict[str, list[str]] = {} if title else {"q8:0": [], "kch:4": []}
        for bound in classes.BOUNDS:
            codec, _ = classes.choose(TierConfig(url="disk:///x", codec=bound, profile=mine.id), meanings)
            asked.setdefault(codec.name if codec.exact else f"{codec.name}:{codec.level}", []).append(bound)
        report = lmkv(
            "codec", "report", folder, "--texts", folder / "fresh", "--prefix", 2 * PAGE, "--no-baselines",
            "--profile", folder / f"{mine.id}.lmkvp", "--codecs", ",".join(asked),
        )  # fmt: skip
        for row in report["rows"]:
            noted = mine.kl[int(row["method"][4:])] if row["method"].startswith("klt:") else None
            rows.append(
                {
                    "classes": asked[row["method"]],
                    "codec": row["method"],
                    "profile": title,
                    "bits/value": row["bits"][0],
                }
                | {"noted KL": noted, "KL": row["kl"][0], "KL high": row["kl"][2], "top-1": row["top1"][0]}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(1)
    if not (a.folder / "config.json").is_file():
        print(learn(a.folder))
    for row in (rows := held(a.folder)):
        row["classes"] = " ".join(row["classes"])
        row |= {name: f"{x:.5f}" for name, x in row.items() if "KL" in name and x is not None}
    emit(rows)


if __name__ == "__main__":
    main()
