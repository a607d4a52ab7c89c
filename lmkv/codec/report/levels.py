"""The measured error of a profile's levels, for `lmkv codec calibrate`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence

from lmkv.codec import get
from lmkv.codec import profile as profiles
from lmkv.codec.profile import Profile
from lmkv.codec.report.measure import measure
from lmkv.codec.report.methods import ThroughCodec
from lmkv.codec.report.metrics import Resampling, mean
from lmkv.codec.report.model import CHUNK_TOKENS, Model
from lmkv.codec.report.texts import Text
from lmkv.errors import ConfigError

PREFIXES = (1024, 2048)
CONTINUATION = 64


def apart(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Texts to fit a profile on, and texts to measure it on: every fourth one, and at least one of two."""
    step = min(4, len(texts))
    kept = [text for i, text in enumerate(texts) if step < 2 or i % step != step - 1]
    return kept, [text for text in texts if text not in kept]


def error_of(model: Model, texts: Sequence[Text]) -> Callable[[Profile, int], float]:
    """A function of a profile and a level: the mean KL divergence over ``texts``, of the worst prefix length.

    It is the upper end of the mean's 95 % interval: a class takes the coarsest level below its bound, so a mean of a
    few texts would often be one that came out low by chance.

    Prefixes of 1,024 and 2,048 tokens as far as all texts have them and the model was made for them, else of as many
    chunks as the shortest has; texts shorter than one chunk are left out. ConfigError: none is longer.
    """
    least = CHUNK_TOKENS + CONTINUATION + 1
    if model.max_tokens < least:
        raise ConfigError(
            "MODEL", f"made for {model.max_tokens} tokens; errors are measured on {least}: --no-errors does without"
        )
    lengths = {each.name: len(model.encode(each.text)) for each in texts}
    texts = [each for each in texts if lengths[each.name] >= least]
    if not texts:
        names = ", ".join(lengths)
        raise ConfigError(
            "--texts", f"{names}: errors are measured on texts of {least} tokens; --no-errors does without"
        )
    room = min(model.max_tokens, *(lengths[each.name] for each in texts)) - CONTINUATION - 1
    prefixes = [each for each in PREFIXES if each <= room] or [room // CHUNK_TOKENS * CHUNK_TOKENS]

    def error(profile: Profile, level: int) -> float:
        with tempfile.TemporaryDirectory(prefix="lmkv-calibrate-") as folder:
            profile.save(folder)
            profiles.look_in([folder])  # where the decoder finds it
            method = ThroughCodec(get("klt", level, profile.id), model.geometry, "klt", profile.nbytes)
            report = measure(model, texts, [method], prefixes, CONTINUATION)
        draws = Resampling(len(texts), CONTINUATION)
        return max(draws.interval(mean, row.figures("kl")).high for row in report.rows)

    return error
