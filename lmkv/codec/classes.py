"""Error classes: how much a tier's codec may change what a model computes, and which codec that comes down to.

The error of a codec is the mean KL divergence, in nats, of the next token's distribution after a decoded prefix from
that after the exact one. ``exact`` is none; ``kl<0.01`` is less than 0.01, as measured with the profile that the tier
names, or else in docs/codecs.md.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from lmkv.codec import base
from lmkv.codec.base import Codec
from lmkv.errors import BadContainer, ConfigError, nearest

if TYPE_CHECKING:
    from lmkv.chunk import Header
    from lmkv.codec.profile import Profile
    from lmkv.codec.shape import Meaning, Meanings
    from lmkv.config import TierConfig

BOUNDS = {"exact": 0.0, "kl<0.001": 0.001, "kl<0.01": 0.01, "kl<0.05": 0.05}
LOSSLESS, PROFILED = "xpl", "klt"


class Measured(NamedTuple):
    """One codec without a profile at one level: bits a value, the largest KL of all measurements, and what of the
    payload the codec was told in them."""

    codec: str
    level: int
    bits: float
    kl: float
    needs: str = "geometry"


MEASURED: tuple[Measured, ...] = (
    Measured("fp8", 0, 8.0, 0.0036, "dtype"),
    Measured("q8", 0, 8.25, 0.0004),
    Measured("kch", 4, 3.04, 0.0196),
)


class Choice(NamedTuple):
    """A tier's codec, and the error up to which it takes what others have written there."""

    codec: Codec
    limit: float


def choose(tier: TierConfig, meanings: Meanings | None = None, key: str = "tiers.0") -> Choice:
    """The codec that a tier's settings come down to. ConfigError names the setting below ``key`` and the way out.

    meanings: what is known of the payload; None to check the settings alone.
    """
    try:
        if tier.codec in BOUNDS:
            return Choice(_cheapest(tier, meanings), BOUNDS[tier.codec])
        if tier.codec not in base.names():
            raise ConfigError(
                "codec", f"there is no codec {tier.codec!r}{nearest(tier.codec, [*base.names(), *BOUNDS])}"
            )
        profile = _profile(tier.profile, meanings)
        codec = base.get(tier.codec, tier.level, profile.id if profile else "")
    except ConfigError as error:
        raise ConfigError(f"{key}.{error.key}", error.message) from None
    if meanings is not None and not _can(codec.needs, meanings):
        works = [name for name in base.names() if _works(name, meanings)]
        what = "how pages are laid out" if codec.needs == "geometry" else "the dtype"
        raise ConfigError(
            f"{key}.codec", f"{codec.name} must know {what}, which it is not told here; these work: {', '.join(works)}"
        )
    return Choice(codec, 0.0 if codec.exact else math.inf)


def error(header: Header) -> float:
    """The error of a container: 0 when it is exact, infinite when nobody knows."""
    if not header.lossy:
        return 0.0
    if header.codec == PROFILED:
        try:
            return _find(header.profile).kl.get(header.level, math.inf)
        except BadContainer:
            return math.inf
    return next((each.kl for each in MEASURED if (each.codec, each.level) == (header.codec, header.level)), math.inf)


def _cheapest(tier: TierConfig, meanings: Meanings | None) -> Codec:
    """The codec and level of the fewest bits within a class."""
    if tier.level is not None:
        raise ConfigError("level", f"the class {tier.codec} chooses the level: leave it out")
    bound = BOUNDS[tier.codec]
    if (profile := _profile(tier.profile, meanings)) and (meanings is None or _can("geometry", meanings)):
        levels = [level for level, kl in profile.kl.items() if kl < bound]
        if levels:
            return base.get(PROFILED, max(levels), profile.id)
    for each in sorted(MEASURED, key=lambda each: each.bits):
        if each.kl < bound and (meanings is None or (_can(each.needs, meanings) and _works(each.codec, meanings))):
            return base.get(each.codec, each.level)
    return base.get(LOSSLESS if meanings is None or _works(LOSSLESS, meanings) else "raw")


def _works(name: str, meanings: Meanings) -> bool:
    try:
        return _can(base.kind(name).needs, meanings)
    except ConfigError:
        return False


def _can(needs: str, meanings: Meanings) -> bool:
    """Some group's payload is known well enough; what is not is stored raw."""
    return needs == "bytes" or any(each.axes or needs == "dtype" for each in meanings)


def _profile(name: str, meanings: Meanings | None) -> Profile | None:
    """The profile of that file or id. ConfigError: there is none, or it is not of this model as it is stored here."""
    if not name:
        return None
    from lmkv.codec import profile as profiles

    try:
        found = profiles.open_profile(name)
    except BadContainer as wrong:
        raise ConfigError("profile", str(wrong)) from None
    about = found.description
    sizes = about.heads, about.dim, about.dim_v
    here = [each for each in meanings or () if each.axes]
    alike = [each for each in here if (each.heads, each.dim, each.dim_v) == sizes]
    if here and not alike:
        others = sorted({(each.heads, each.dim, each.dim_v) for each in here})
        raise ConfigError("profile", f"{about.model} caches {sizes} (heads, K and V width), this model {others}")
    reasons = [_misfit(found, each) for each in alike]
    if reasons and all(reasons):
        raise ConfigError("profile", reasons[0])
    return found


def _misfit(profile: Profile, meaning: Meaning) -> str:
    """Why caches of as many and as wide heads cannot be coded with the profile as well as it says; '' where they can,
    as far as is known."""
    from lmkv.codec.floats import WIDE
    from lmkv.codec.klt import fits

    about, turned = profile.description, profile.rope
    if meaning.layers not in (0, about.layers):
        return f"{about.model} has {about.layers} layers that cache alike, here are {meaning.layers} of them"
    if meaning.rope and turned and not turned.like(meaning.rope):
        return f"{about.model} rotates its keys by other angles than this model"
    if meaning.dtype not in WIDE:
        return f"{PROFILED} takes no {meaning.dtype} caches"
    if not all(fits(profile, part) for part in meaning.parts()):
        most = max(place.layers for place in about.blocks)
        return (
            f"its blocks of up to {most} layers do not fit into the parts that chunks of {meaning.chunk_tokens} tokens "
            f"are cut into: make one with `lmkv codec calibrate --chunk-tokens {meaning.chunk_tokens}`, or set the "
            "chunk_tokens that it was made for"
        )
    return ""


def _find(identity: str) -> Profile:
    from lmkv.codec import profile as profiles

    return profiles.find(identity)
