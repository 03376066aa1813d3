"""A schedule file as bytes: an .npz of flat int32 arrays and a JSON header, inside an xz stream.

A recording comes with somebody's bug report, so reading one trusts nothing: it is decompressed in
pieces, every size is compared with the limit before memory is taken for it, and only what `pack`
writes is accepted (entries in its order, not compressed a second time).
"""

from __future__ import annotations

import io
import json
import lzma
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fused_slots.recording.arrays import ARRAYS, Int32Array, ScheduleError, ScheduleSizeError
from fused_slots.recording.calls import CALL_ARRAYS

FORMAT = "fused_slots schedule"
VERSIONS: Mapping[int, Mapping[str, bool]] = {1: ARRAYS, 2: CALL_ARRAYS, 3: CALL_ARRAYS}
"""The arrays of each version: 1 a scheduler's steps, 2 the calls of a manager, 3 the calls of the
managers of all ranks, rank by rank."""

MAX_BYTES = 256 << 20
"""Default limit of what a file may ask for, in bytes; shipped recordings need 3 MB at most."""

DAMAGE = (
    *(lzma.LZMAError, EOFError, ValueError, TypeError, AttributeError, LookupError),
    *(RecursionError, OverflowError, struct.error),
)
"""What reading a damaged or foreign file can raise."""

_PIECE = 1 << 20
_DECODER_BYTES = 128 << 20  # the dictionary of preset 9 takes 65 MiB
_HEADER_SHARE = 16  # JSON values take many times the bytes of their text
_CONTAINER_BYTES = 64 << 10  # of the list of entries behind the last of them

_ENTRY = struct.Struct("<4sHHH4xL2LHH")
_SIZES = struct.Struct("<HHQQ")
_ENTRY_START = b"PK\x03\x04"
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(<i4|\|u1)', 'fortran_order': False, "
    rb"'shape': \((\d{1,10}),\), \} *\n",
    re.DOTALL,
)


def pack(header: Mapping[str, Any], arrays: Mapping[str, Int32Array], version: int) -> bytes:
    """The bytes of a file; equal input gives equal bytes."""
    text = json.dumps({"format": FORMAT, "version": version, **header})
    content: dict[str, npt.NDArray[Any]] = {"header": np.frombuffer(text.encode(), np.uint8)}
    content.update({array: arrays[array].astype("<i4") for array in VERSIONS[version]})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for array, values in content.items():
            # A ZipInfo made by hand carries no time of day.
            with archive.open(zipfile.ZipInfo(f"{array}.npy"), "w") as file:
                np.save(file, values.reshape(-1), allow_pickle=False)
    # An engine waits for the calls of its manager to be written.
    return lzma.compress(buffer.getvalue(), preset=1 if version == 2 else 9)


def unpack(
    file: BinaryIO, source: str, max_bytes: int = MAX_BYTES
) -> tuple[int, dict[str, Any], dict[str, Int32Array]]:
    """Version, header and arrays of a file; the arrays are still to be validated.

    Args:
        file: read to its end.
        source: its name, for errors.
        max_bytes: of all arrays and the header together.

    Raises:
        ScheduleError: it is not a schedule file, is of another version, is damaged or too large.
    """
    stream, left = _Stream(file), max_bytes
    arrays: dict[str, npt.NDArray[Any]] = {}

    def read(array: str, limit: int) -> npt.NDArray[Any]:
        size = _entry_size(stream, f"{array}.npy")
        check_size(source, size, limit, f"in {array}", max_bytes)
        nonlocal left
        left -= size
        return _array(stream.read(size))

    try:
        text = read("header", max_bytes // _HEADER_SHARE).tobytes()
        header = json.loads(text, parse_constant=_refuse_constant)
        found = header.pop("format"), header.pop("version")
        if found[0] == FORMAT and found[1] in VERSIONS:
            arrays = {array: read(array, left) for array in VERSIONS[found[1]]}
            stream.drain(_CONTAINER_BYTES)
    except ScheduleSizeError:
        raise
    except DAMAGE as error:
        raise damaged(source, error) from error
    if not arrays:
        versions = " or ".join(map(str, VERSIONS))
        raise ScheduleError(
            source,
            expected=f"format {FORMAT!r} version {versions}",
            actual=f"format {found[0]!r} version {found[1]!r}",
        )
    return found[1], header, arrays


def check_size(source: str, size: int, limit: int, what: str, max_bytes: int) -> None:
    """Refuse what a file asks for beyond the limit, before any memory is taken for it.

    Raises:
        ScheduleSizeError: names the limit and how to raise it.
    """
    if size > limit:
        raise ScheduleSizeError(
            source,
            expected=f"at most {limit:,} bytes {what} (max_bytes is {max_bytes:,})",
            actual=f"{size:,}",
            hint="If you trust the file, raise max_bytes (--max-mib on the command line)",
        )


def damaged(source: str, error: Exception) -> ScheduleError:
    """The error for a file that is not what `pack` writes."""
    return ScheduleError(
        source,
        expected="a complete fused_slots schedule file (.npz.xz)",
        actual=f"{type(error).__name__}: {str(error)[:200]}",
    )


class _Stream:
    """An xz stream, decompressed as far as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DECODER_BYTES)

    def read(self, size: int) -> bytearray:
        """Exactly `size` bytes."""
        content = bytearray()
        while len(content) < size:
            content += self._piece(min(size - len(content), _PIECE))
            if self._decoder.eof and len(content) < size:
                raise EOFError("the stream ends early")
        return content

    def drain(self, limit: int) -> None:
        """Read to the end, which must come within `limit` bytes."""
        while not self._decoder.eof:
            limit -= len(self._piece(limit + 1))
            if limit < 0:
                raise ValueError("there is more behind the last array")
        if self._decoder.unused_data or self._file.read(1):
            raise ValueError("there is more behind the end of the stream")

    def _piece(self, size: int) -> bytes:
        compressed = b""
        if self._decoder.needs_input and not (compressed := self._file.read(_PIECE)):
            raise EOFError("the file ends early")
        return self._decoder.decompress(compressed, max_length=size)


def _entry_size(stream: _Stream, name: str) -> int:
    """Bytes of the next entry, which must have this name and be stored as it is."""
    fields = _ENTRY.unpack(bytes(stream.read(_ENTRY.size)))
    start, _version, flags, method, _crc, size, full_size, name_length, extra_length = fields
    if start != _ENTRY_START or flags or method or size != full_size:
        raise ValueError(f"no plain entry where {name} should be")
    if (found := bytes(stream.read(name_length))) != name.encode():
        raise ValueError(f"entry {found[:50]!r} where {name} should be")
    extra = stream.read(extra_length)
    if extra_length:  # numpy.savez always writes its sizes in 64 bits
        tag, length, full_size, size = _SIZES.unpack(extra)
        if (tag, length) != (1, 16) or size != full_size:
            raise ValueError(f"an entry of two sizes where {name} should be")
    return int(size)


def _array(content: bytearray) -> npt.NDArray[Any]:
    """The array of an .npy entry: one axis, int32 or bytes; a view of `content`."""
    found = _NPY.match(content)
    if found is None:
        raise ValueError("an array that is no flat int32 one")
    values = np.frombuffer(content, np.dtype(found[1].decode()), offset=found.end())
    if len(values) != int(found[2]):
        raise ValueError(f"{len(values)} items in an array of {int(found[2])}")
    return values


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")
