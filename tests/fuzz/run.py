"""Coverage-guided fuzzing of one target: ``python tests/fuzz/run.py TARGET SECONDS``, with atheris installed.

New inputs go to .cache/fuzz/TARGET; the corpus in the tree, tests/fuzz/corpus/TARGET, is where it starts from.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))

from targets import TARGETS  # noqa: E402


def main(name: str, seconds: str) -> None:
    grown = HERE.parent.parent / ".cache" / "fuzz" / name
    grown.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        "-timeout=30",
        "-rss_limit_mb=4096",
        "-max_len=16384",
        "-print_final_stats=1",
    ]
    prefix = f"-artifact_prefix={grown.parent}/{name}-"
    atheris.instrument_all()  # an editable installation has an import hook of its own, which atheris' would not see
    atheris.Setup([sys.argv[0], *options, prefix, str(grown), str(HERE / "corpus" / name)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
