"""Facts in a long text, and questions for them: does a model still find them after a codec?

Each document has the same eight facts, each of its own kind, at eight depths in changing order, with plain sentences
between; what they say is drawn at random, so that only the document tells. A question begins the fact's sentence
again, and the answer is the word that ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmkv.errors import ConfigError

_NAMES = "Alice Bruno Clara David Elena Felix Grace Henry Irene Laura Martin Oscar Paula Rosa Simon Teresa Victor"
_PLACES = "Paris London Berlin Madrid Rome Vienna Oslo Dublin Prague Warsaw Lisbon Athens Cairo Tokyo Sydney Boston"
_FRUITS = "apples oranges cherries lemons plums pears grapes bananas peaches melons figs dates mangoes apricots"
_COLOURS = "red green blue yellow orange purple black white brown pink grey silver"
_THINGS = "hammer lantern basket mirror violin kettle ladder pencil blanket candle compass barrel saddle bottle"
_ANIMALS = "horse tiger rabbit eagle dolphin wolf turtle camel elephant fox owl penguin monkey bear lion"
_JOBS = "baker doctor farmer lawyer painter pilot sailor singer soldier teacher tailor writer nurse butcher"
_METALS = "copper silver iron gold steel tin bronze lead brass zinc nickel aluminium platinum titanium"

FACTS = (
    ("The name of the captain of the ferry is", _NAMES),
    ("The old professor was born in the city of", _PLACES),
    ("The basket under the kitchen table is full of", _FRUITS),
    ("The front door of the post office was painted", _COLOURS),
    ("The thing that was stolen from the museum was a", _THINGS),
    ("The animal on the flag of the village is a", _ANIMALS),
    ("Before she moved to the coast, my aunt worked as a", _JOBS),
    ("The bell in the church tower is made of", _METALS),
)
_SUBJECTS = (
    "The road,The river,The morning,The market,The harbour,The garden,The winter,The train,The weather,The forest"
)
_VERBS = "was quiet,seemed longer than usual,had changed little,was busy again,looked much the same,was cold and bright"
_ENDS = "that year,for most of the week,after the rain,before the holidays,as people often said,in those days,by noon"


class Question(NamedTuple):
    """ids: tokens of the question; answer: those of the answer; depth: of the fact, 0 to 1."""

    ids: list[int]
    answer: list[int]
    depth: float


class Task(NamedTuple):
    """A document of so many tokens, and its questions by rising depth."""

    ids: list[int]
    questions: list[Question]


def make(encode: Callable[[str], Any], tokens: int, number: int) -> Task:
    """Document ``number``, of exactly ``tokens`` tokens. encode: text to token ids, without special ones.

    ConfigError: the facts do not fit.
    """
    random = np.random.default_rng(number)
    facts = [(start, _pick(words.split(), random)) for start, words in FACTS]
    order = random.permutation(len(facts))
    lines = [list(encode(f" {facts[i][0]} {facts[i][1]}.")) for i in order]
    room = tokens - sum(map(len, lines))
    if room < 8 * len(facts):
        raise ConfigError("--prefix", f"{tokens} tokens are too few for the retrieval task")
    ids: list[int] = []
    questions = []
    for place, line in enumerate(lines):
        until = room * (2 * place + 1) // (2 * len(lines)) + sum(map(len, lines[:place]))
        _fill(ids, until, encode, random)
        depth = len(ids) / tokens
        ids += line
        start, word = facts[order[place]]
        both, question = list(encode(f"\n\n{start} {word}")), list(encode(f"\n\n{start}"))
        questions.append(Question(question, both[len(question) :], depth))
    _fill(ids, tokens, encode, random)
    return Task(ids, questions)


def _fill(ids: list[int], until: int, encode: Callable[[str], Any], random: np.random.Generator) -> None:
    """Add plain sentences up to exactly ``until`` tokens; the last one may break off."""
    while len(ids) < until:
        subject, verb, end = (_pick(each.split(","), random) for each in (_SUBJECTS, _VERBS, _ENDS))
        ids += list(encode(f" {subject} {verb} {end}."))
    del ids[until:]


def _pick(words: Sequence[str], random: np.random.Generator) -> str:
    return words[int(random.integers(len(words)))]
