"""A whole report: every text, prefix length and method, side by side on the same KV.

For each text the prefix is computed once, as long as the longest; shorter ones are its beginning, attention being
causal. Its KV is rounded to bfloat16: that is the exact KV. The model then reads the tokens that follow, given the
exact KV and given what each method gives back, and its expectations after each of them are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lmkv.codec.report.methods import Coded, Method
from lmkv.codec.report.metrics import F64, Positions, compare, log_softmax
from lmkv.codec.report.model import CHUNK_TOKENS, KV, Ids, Model
from lmkv.codec.report.retrieval import Task, make
from lmkv.codec.report.texts import Text
from lmkv.errors import ConfigError


@dataclass
class Timing:
    """Seconds of each chunk, and a chunk's raw bytes."""

    raw_bytes: int
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)


@dataclass
class Row:
    """One method at one prefix length. bits, stored: bits a value of each text, of streams and of whole containers
    (NaN where they are simulated); the others [texts, positions], as in `Positions`."""

    method: str
    prefix: int
    profile_bytes: int
    timing: Timing
    bits: list[float] = field(default_factory=list)
    stored: list[float] = field(default_factory=list)
    positions: list[Positions] = field(default_factory=list)

    def figures(self, name: str) -> F64:
        """``kl``, ``agree``, ``loss`` or ``exact_loss``: [texts, positions]."""
        return np.stack([getattr(each, name) for each in self.positions])


@dataclass
class Answers:
    """One method on the retrieval task: right [documents, questions], 1.0 where every token of an answer is the
    likeliest; kl [documents, questions], mean over an answer's tokens."""

    method: str
    prefix: int
    right: list[list[float]] = field(default_factory=list)
    kl: list[list[float]] = field(default_factory=list)


@dataclass
class Report:
    """What was measured on what."""

    model: str
    dtype: str
    weight_bytes: int
    texts: list[str]
    continuation: int
    rows: list[Row]
    answers: list[Answers] = field(default_factory=list)
    depths: list[float] = field(default_factory=list)


def token_ids(model: Model, texts: Iterable[Text], count: int) -> list[Ids]:
    """The first ``count`` tokens of each text. ConfigError names the text that is too short."""
    found = []
    for name, text in texts:
        ids = model.encode(text[: 64 * count])
        if len(ids) < count:
            message = f"{name} has {len(ids)} tokens, {count} are needed: leave it out, or shorten --prefix"
            raise ConfigError("--texts", message)
        found.append(ids[:count])
    return found


def check(model: Model, prefixes: Sequence[int], continuation: int) -> None:
    """ConfigError: prefixes that are no chunks, or more tokens than the model was made for."""
    for prefix in prefixes:
        if prefix < CHUNK_TOKENS or prefix % CHUNK_TOKENS:
            near = max(1, round(prefix / CHUNK_TOKENS)) * CHUNK_TOKENS
            raise ConfigError("--prefix", f"{prefix} tokens are no whole chunks of {CHUNK_TOKENS}; {near} would be")
    if not prefixes or continuation < 1:
        raise ConfigError("--continuation", "there is nothing to measure")
    if max(prefixes) + continuation + 1 > model.max_tokens:
        raise ConfigError("--prefix", f"the model was made for {model.max_tokens} tokens")


def measure(
    model: Model, texts: Sequence[Text], methods: Sequence[Method], prefixes: Sequence[int], continuation: int,
    steps: Iterable[tuple[int, int]] | None = None,
) -> Report:  # fmt: skip
    """Measure. steps: (text, method) pairs as ``schedule`` gives them, to be watched; all of them when None.

    Interrupted (KeyboardInterrupt), it is a report of the texts that every method has seen, if there is one.
    """
    check(model, prefixes, continuation)
    prefixes = sorted(set(prefixes))
    inputs = token_ids(model, texts, prefixes[-1] + continuation + 1)
    timings = [Timing(model.geometry.spec.chunk_bytes(0)) for _ in methods]
    rows = [
        [Row(each.name, prefix, each.profile_bytes, timing) for prefix in prefixes]
        for each, timing in zip(methods, timings, strict=True)
    ]
    try:
        _measure(model, inputs, methods, rows, continuation, steps or schedule(len(texts), len(methods)))
    except KeyboardInterrupt:
        _finished(rows)
    seen = len(rows[0][0].positions) if rows else 0
    return Report(
        model.name, str(model.dtype).removeprefix("torch."), model.weight_bytes, [name for name, _ in texts][:seen],
        continuation, [row for each in rows for row in each],
    )  # fmt: skip


def _measure(
    model: Model, inputs: Sequence[Ids], methods: Sequence[Method], rows: Sequence[Sequence[Row]], continuation: int,
    steps: Iterable[tuple[int, int]],
) -> None:  # fmt: skip
    """Fill the rows, of each method one a prefix length, rising."""
    at, kv, exact = -1, None, {}
    for text, number in steps:
        ids = inputs[text]
        prefixes = [row.prefix for row in rows[number]]
        if text != at or kv is None:
            at, kv = text, model.prefill(ids[: prefixes[-1]])
            exact = {prefix: _expected(model, kv.crop(prefix), ids, continuation) for prefix in prefixes}
        coded = methods[number].code(kv)
        _note_times(rows[number][0].timing, coded)
        for row in rows[number]:
            decoded = _expected(model, coded.kv.crop(row.prefix), ids, continuation)
            targets = ids[row.prefix + 1 : row.prefix + 1 + continuation]
            row.positions.append(compare(exact[row.prefix], decoded, targets))
            _note_bits(row, coded)


def _finished(rows: Sequence[Sequence[Row]]) -> None:
    """Keep what all rows have; KeyboardInterrupt when that is nothing."""
    each = [row for of_method in rows for row in of_method]
    seen = min(len(row.positions) for row in each)
    if not seen:
        raise KeyboardInterrupt
    for row in each:
        del row.bits[seen:], row.stored[seen:], row.positions[seen:]


def schedule(texts: int, methods: int) -> list[tuple[int, int]]:
    """What `measure` does, in order: all methods on one text, then the next text."""
    return [(text, method) for text in range(texts) for method in range(methods)]


def ask(
    model: Model, methods: Sequence[Method], prefix: int, documents: int, steps: Iterable[tuple[int, int]] | None = None
) -> tuple[list[Answers], list[float]]:
    """The retrieval task: answers with exact KV (first) and with each method's, and the depth of each question in its
    document, 0 to 1. steps: (document, method) pairs to be watched, of ``len(methods) + 1`` methods."""
    check(model, (prefix,), 1)
    answers = [Answers("exact", prefix), *(Answers(each.name, prefix) for each in methods)]
    task, kv, exact, at = Task([], []), None, [], -1
    for document, number in steps if steps is not None else schedule(documents, len(answers)):
        if document != at or kv is None:
            task = make(model.encode, prefix, document)
            at, kv = document, model.prefill(np.array(task.ids))
            exact = _answers(model, kv, task)
        found = exact if number == 0 else _answers(model, methods[number - 1].code(kv).kv, task)
        rights, kls = [], []
        for question, mine, theirs in zip(task.questions, found, exact, strict=True):
            figures = compare(theirs, mine, np.array(question.answer))
            rights.append(float((mine.argmax(-1) == question.answer).all()))
            kls.append(float(figures.kl.mean()))
        answers[number].right.append(rights)
        answers[number].kl.append(kls)
    return answers, [question.depth for question in task.questions]


def _expected(model: Model, kv: KV, ids: Ids, count: int) -> F64:
    """Log probabilities after each of the ``count`` tokens that follow a prefix."""
    prefix = kv.k.shape[2]
    return log_softmax(model.over(kv).logits(ids[prefix : prefix + count]))


def _answers(model: Model, kv: KV, task: Task) -> list[F64]:
    """Log probabilities of each token of each answer, the right ones being read so far."""
    prefix = model.over(kv)
    found = []
    for question in task.questions:
        logits = prefix.logits([*question.ids, *question.answer[:-1]])
        found.append(log_softmax(logits[len(question.ids) - 1 :]))
    return found


def _note_times(timing: Timing, coded: Coded) -> None:
    timing.encode += coded.encode
    timing.decode += coded.decode
    timing.copy += coded.copy


def _note_bits(row: Row, coded: Coded) -> None:
    chunks = row.prefix // CHUNK_TOKENS
    count = chunks * row.timing.raw_bytes / 2
    row.bits.append(sum(coded.bits[:chunks]) / count)
    row.stored.append(8 * sum(coded.stored[:chunks]) / count if coded.stored else float("nan"))
