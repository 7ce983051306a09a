"""The text of a file in any encoding, read as UTF-8. A byte that is not of the encoding is named by its place."""

from __future__ import annotations

import codecs
import io
import sys
import threading
from collections.abc import Generator

import pyarrow as pa
from rayps_client.errors import ConfigError, DataError

_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8"}  # at a file's begin


def checked_encoding(encoding: str) -> str:
    """Return the name that Python uses for a text encoding. Raises ConfigError if there is no such encoding."""
    try:
        "a".encode(encoding)
        codecs.getincrementaldecoder(encoding)
        return codecs.lookup(encoding).name
    except (LookupError, TypeError, ValueError):
        raise ConfigError(
            f"encoding is {encoding!r}: give a text encoding of Python, such as 'utf-8', 'latin-1', 'cp1252' or "
            "'utf-16'",
            field="encoding",
        ) from None


def decoded(file: str, encoding: str, size: int) -> Generator[bytes, None, None]:
    """Yield the text of a file as UTF-8, from pieces of `size` bytes. The last line ends with a line feed.

    A file whose name says so, e.g. by .gz, is decompressed. Raises DataError, which names the line and the byte, if a
    byte is not of this encoding.
    """
    decoder = codecs.getincrementaldecoder(encoding)()
    begin, done, lines, ended = b"", 0, 0, True
    with pa.input_stream(file) as source:
        while True:
            piece = source.read(size)
            begin = begin or piece[:3]
            try:
                text = decoder.decode(piece, final=not piece)
            except UnicodeError as error:
                if not isinstance(error, UnicodeDecodeError):
                    raise _wrong(file, encoding, begin, f"{file}: {error}") from None
                at = done + len(piece) - len(error.object) + error.start
                lines += error.object[: error.start].decode(encoding, "ignore").count("\n")
                which = f"line {lines + 1}: byte {at} is 0x{error.object[error.start]:02x}, which is not {encoding}"
                raise _wrong(file, encoding, begin, f"{file}: {which}", line=lines + 1, byte=at) from None
            done, lines = done + len(piece), lines + text.count("\n")
            if text:
                ended = text.endswith("\n")
                yield text.encode()
            if not piece:
                break
    if not ended:
        yield b"\n"


def _wrong(file: str, encoding: str, begin: bytes, what: str, **place: int) -> DataError:
    marked = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)
    near = marked or ("latin-1" if encoding == "utf-8" else "utf-8")
    return DataError(
        f"{what}\ngive the encoding of the file, e.g. encoding={near!r}", file=file, encoding=encoding, **place
    )


class DecodedText(io.RawIOBase):
    """Pieces of a text as a file, which threads of Arrow read. Only the last read is shorter than it was asked for."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        self._pieces, self._lock = pieces, threading.Lock()
        self._rest = next((piece for piece in pieces if piece.strip()), b"")
        self.empty = not self._rest

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return `size` bytes, or all if it is negative; fewer at the end of the text."""
        wanted = sys.maxsize if size < 0 else size
        with self._lock:
            while len(self._rest) < wanted and (piece := next(self._pieces, b"")):
                self._rest += piece
            found, self._rest = self._rest[:wanted], self._rest[wanted:]
        return found

    def close(self) -> None:
        """Close the file, after a read that is under way."""
        with self._lock:
            self._pieces.close()
        super().close()
