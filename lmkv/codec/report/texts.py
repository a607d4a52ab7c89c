"""Texts to measure on: files, or folders of them, as plain text."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

from lmkv.errors import ConfigError

LARGEST = 16 << 20  # bytes read of one file, packed or not: far more than any prefix needs
_HTML = (".html", ".htm", ".xhtml")


class Text(NamedTuple):
    """name: the file's, for tables."""

    name: str
    text: str


def read(paths: Iterable[str | Path]) -> list[Text]:
    """The texts of files and of folders (every file under them, by name; hidden ones left out).

    ``.gz`` is unpacked, HTML becomes its text; at most 16 MiB of a file are read. ConfigError: a path that does not
    exist, a file that is empty or no UTF-8 text, no file at all.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = (each for each in sorted(path.rglob("*")) if each.is_file())
            files += [each for each in inside if not any(p.startswith(".") for p in each.relative_to(path).parts)]
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError("--texts", f"there is no {path}")
    if not files:
        raise ConfigError("--texts", "no text is in there")
    return [Text(path.name, read_file(path)) for path in files]


def read_file(path: Path) -> str:
    """One file as text. ConfigError: empty, or not text."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(LARGEST)
        # the end may have cut a character in two
        text = data.decode("utf-8", "ignore" if len(data) == LARGEST else "strict")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError("--texts", f"{path} is no UTF-8 text: {error}") from None
    if "\0" in text:
        raise ConfigError("--texts", f"{path} is no text: it has zero bytes")
    if path.name.removesuffix(".gz").endswith(_HTML):
        text = _plain(text)
    if not text.strip():
        raise ConfigError("--texts", f"{path} is empty")
    return text


def _plain(html: str) -> str:
    page = _Page()
    page.feed(html)
    page.close()
    lines = (" ".join(line.split()) for line in "".join(page.pieces).split("\n"))
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):  # one empty line between paragraphs
            kept.append(line)
    return "\n".join(kept)


_BLOCKS = ("p", "div", "li", "tr", "br", "dt", "dd", "pre", "table", "ul", "ol", "section", "blockquote", "title")
_HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


class _Page(HTMLParser):
    """Text of a page: blocks end lines, scripts and styles are left out."""

    _ENDS = frozenset((*_BLOCKS, *_HEADINGS))
    _SILENT = frozenset({"script", "style"})

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in self._SILENT
        if tag in self._ENDS:
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(0, self._silent - (tag in self._SILENT))
        if tag in self._ENDS:
            self.pieces.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.pieces.append(data.replace("\n", " "))
