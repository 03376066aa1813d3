"""A recording comes with somebody's bug report: bombs are refused with little memory, and whatever
is changed in a file, reading, checking and replaying it ends well or in an error of ours."""

from __future__ import annotations

import io
import json
import lzma
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fused_slots import BlockTableError
from fused_slots.recording.archive import MAX_BYTES
from fused_slots.recording.arrays import ARRAYS, ScheduleSizeError
from fused_slots.recording.check import ScheduleCheck
from fused_slots.recording.replay import Replay
from fused_slots.recording.schedule import load_schedule
from tests.recording.small_schedules import schedule

LZMA2 = [{"id": lzma.FILTER_LZMA2, "preset": 0}]
SIX_GIB = 6 << 30


def xz(*parts: tuple[bytes, int], dictionary: int | None = None) -> bytes:
    """An xz stream of each part so many times; cut off where its index would begin."""
    stream = lzma.compress(b"x", check=lzma.CHECK_NONE, filters=LZMA2)
    head = bytearray(stream[: 12 + 4 * (stream[12] + 1)])
    if dictionary is not None:
        head[16] = dictionary
        head[-4:] = struct.pack("<L", zlib.crc32(head[12:-4]))
    chunks = (
        lzma.compress(part, lzma.FORMAT_RAW, filters=LZMA2)[:-1] * times for part, times in parts
    )
    return bytes(head) + b"".join(chunks)


def entry(name: str, size: int) -> bytes:
    """The beginning of an archive's entry that claims `size` bytes."""
    name_bytes = f"{name}.npy".encode()
    lengths = (2**32 - 1, 2**32 - 1, len(name_bytes), 20)
    return (
        struct.pack("<4sHHH4xL2LHH", b"PK\x03\x04", 45, 0, 0, 0, *lengths)
        + name_bytes
        + struct.pack("<HHQQ", 1, 16, size, size)
    )


def plain(small: Path) -> bytes:
    return lzma.decompress(small.read_bytes())


def bombs(small: Path) -> dict[str, bytes]:
    """Files of at most a few MB that ask for gigabytes."""
    zeros = (bytes(64 << 20), SIX_GIB // (64 << 20))
    whole = plain(small)
    second = whole.index(b"PK\x03\x04", 4)
    last = whole.index(b"PK\x01\x02")
    return {
        "zeros": xz(zeros),
        "an honest array of 6 GiB": xz((whole[:second] + entry("step_entries", SIX_GIB), 1), zeros),
        "more behind the arrays": xz((whole[:last], 1), zeros),
        "a header of 1 GiB": xz((entry("header", 1 << 30), 1), zeros),
        "a dictionary of 4 GiB": xz((whole, 1), dictionary=40),
    }


@pytest.fixture(name="small")
def _small(tmp_path: Path) -> Path:
    schedule().save(tmp_path / "small.npz.xz")
    return tmp_path / "small.npz.xz"


def test_bombs_are_refused_with_little_memory(small: Path, tmp_path: Path) -> None:
    files = []
    for number, content in enumerate(bombs(small).values()):
        files.append(tmp_path / f"{number}.npz.xz")
        files[-1].write_bytes(content)
        assert len(content) < 4 << 20
    program = (
        "import sys\n"
        "from fused_slots import BlockTableError\n"
        "from fused_slots.recording.schedule import load_schedule\n"
        "def peak():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(l for l in lines if l.startswith('VmHWM')).split()[1]) // 1024\n"
        "before = peak()\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        load_schedule(path)\n"
        "    except BlockTableError as error:\n"
        "        print(error)\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *files], capture_output=True, text=True, check=True
    )
    *errors, megabytes = done.stdout.splitlines()
    assert len(errors) == len(files), errors
    honest, header = errors[1], errors[3]
    assert f"at most {MAX_BYTES:,} bytes" in honest or "max_bytes is 268,435,456" in honest
    assert "got 6,442,450,944. If you trust the file, raise max_bytes (--max-mib" in honest
    assert "at most 16,777,216 bytes in header" in header
    assert "there is more behind the last array" in errors[2]
    assert "Memory usage limit" in errors[4]
    assert int(megabytes) < 64


def header_of(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    return json.loads(arrays.pop("header").tobytes()), arrays


def write(path: Path, header: Any, arrays: dict[str, np.ndarray]) -> None:
    write_text(path, json.dumps(header), arrays)


def write_text(path: Path, header: str, arrays: dict[str, np.ndarray]) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(header.encode(), np.uint8), **arrays)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=0))


@pytest.mark.parametrize(
    "change",
    [
        {"max_num_reqs": 2**31 - 1},
        {"max_num_batched_tokens": 2**31 - 1},
        {"groups": 0, "max_num_blocks": 2**31 - 1},
        {"groups": 1, "block_size": 2**30, "kernel_block_size": 1},
    ],
)
def test_tables_beyond_the_limit_are_refused_before_they_are_made(
    small: Path, change: dict[str, int]
) -> None:
    header, arrays = header_of(plain(small))
    place = header["groups"][change.pop("groups")] if "groups" in change else header
    place.update(change)
    write(small, header, arrays)
    with pytest.raises(ScheduleSizeError, match=r"at most .* bytes in block tables and slots"):
        load_schedule(small)


def test_the_limit_can_be_raised_and_lowered(small: Path) -> None:
    size = len(plain(small))
    with pytest.raises(ScheduleSizeError, match="max_bytes is 2,000"):
        load_schedule(small, max_bytes=2000)
    assert len(load_schedule(small, max_bytes=16 * size)) == 3


def test_the_limit_is_that_of_all_arrays_together(small: Path) -> None:
    header, arrays = header_of(plain(small))
    for name in ("edit_blocks", "append_blocks"):
        arrays[name] = np.zeros(3 << 18, np.int32)
    write(small, header, arrays)
    with pytest.raises(ScheduleSizeError, match="bytes in append_blocks"):
        load_schedule(small, max_bytes=4 << 20)
    with pytest.raises(BlockTableError, match="edit_blocks: expected"):
        load_schedule(small, max_bytes=7 << 20)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[" * 1_000_000, "RecursionError"),
        ('{"version": ' + "9" * 10_000 + "}", "ValueError"),
        ('{"version": NaN}', "ValueError: NaN is no JSON"),
        ("[]", "TypeError"),
        ("7", "AttributeError"),
        ("{}", "KeyError"),
    ],
    ids=["nested", "digits", "NaN", "a list", "a number", "nothing"],
)
def test_a_header_that_is_no_schedule_is_refused(small: Path, text: str, error: str) -> None:
    write_text(small, text, header_of(plain(small))[1])
    with pytest.raises(BlockTableError, match=f"expected a complete .*; got {error}"):
        load_schedule(small)


NUMBERS = [-1, 0, 1, 2, 3, 5, 17, 2**20, 2**31 - 1, 2**31, 2**63, -(2**70), 1.5, 1e308]
ODD = [None, True, "", "x" * 2000, "\x1b[2J\ud800", [], {}, [[]], [None], {"": {}}, *NUMBERS]


def changed_header(random: np.random.Generator, value: Any) -> Any:
    """`value` with one thing in it replaced, removed or doubled, at a random depth."""
    if not isinstance(value, (dict, list)) or not value or random.random() < 0.15:
        return ODD[random.integers(len(ODD))]
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[random.integers(len(keys))]
    if random.random() < 0.15:
        return type(value)(
            value[k] if isinstance(value, list) else (k, value[k]) for k in keys if k != key
        )
    changed = value.copy()
    changed[key] = changed_header(random, value[key])
    return changed


def changed_arrays(
    random: np.random.Generator, arrays: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    arrays = {name: values.copy() for name, values in arrays.items()}
    for _ in range(random.integers(1, 4)):
        name = list(ARRAYS)[random.integers(len(ARRAYS))]
        values = arrays[name]
        if random.random() < 0.2 or not len(values):
            size = int(random.integers(4))
            arrays[name] = np.append(values, random.integers(0, 9, size)).astype(np.int32)
        elif random.random() < 0.2:
            arrays[name] = values[: random.integers(len(values))]
        else:
            odd = [n for n in NUMBERS if isinstance(n, int) and -(2**31) <= n < 2**31]
            values[random.integers(len(values))] = random.choice(odd)
    return arrays


def changed_bytes(random: np.random.Generator, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.integers(1, 6)):
        at = int(random.integers(len(changed)))
        kind = random.integers(3)
        if kind == 0:
            changed[at] = random.integers(256)
        elif kind == 1:
            del changed[at : at + int(random.integers(1, 40))]
        else:
            changed[at:at] = changed[at : at + int(random.integers(1, 40))]
    return bytes(changed)


def use(path: Path) -> str:
    """Read, check and replay a file; what became of it."""
    try:
        loaded = load_schedule(path, max_bytes=4 << 20)
    except BlockTableError:
        return "refused"
    findings = list(ScheduleCheck(loaded))
    try:
        for replayed in Replay(loaded):
            assert len(replayed.blocks_in_use) == len(loaded.groups)
    except BlockTableError:
        return "refused by the manager"
    return "findings" if findings else "good"


def by_bytes(random: np.random.Generator, path: Path, content: bytes) -> None:
    path.write_bytes(lzma.compress(changed_bytes(random, content), preset=0))


def by_compressed_bytes(random: np.random.Generator, path: Path, content: bytes) -> None:
    path.write_bytes(changed_bytes(random, lzma.compress(content, check=lzma.CHECK_NONE, preset=0)))


def by_header(random: np.random.Generator, path: Path, content: bytes) -> None:
    header, arrays = header_of(content)
    write(path, changed_header(random, header), arrays)


def by_arrays(random: np.random.Generator, path: Path, content: bytes) -> None:
    header, arrays = header_of(content)
    write(path, header, changed_arrays(random, arrays))


@pytest.mark.parametrize(
    ("change", "times", "outcomes"),
    [
        (by_bytes, 600, {"refused"}),
        (by_compressed_bytes, 600, {"refused"}),
        (by_header, 600, {"refused", "good", "refused by the manager"}),
        (by_arrays, 900, {"refused", "good", "findings"}),
    ],
)
def test_whatever_is_changed_ends_well_or_in_an_error_of_ours(
    change: Callable[[np.random.Generator, Path, bytes], None],
    times: int,
    outcomes: set[str],
    small: Path,
) -> None:
    random, content = np.random.default_rng(0), plain(small)
    seen = set()
    for _ in range(times):
        change(random, small, content)
        seen.add(use(small))
    assert seen >= outcomes


def test_a_file_compressed_twice_is_refused(small: Path) -> None:
    header, arrays = header_of(plain(small))
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez_compressed(buffer, header=text, **arrays)
    small.write_bytes(lzma.compress(buffer.getvalue()))
    with pytest.raises(BlockTableError, match="no plain entry where header"):
        load_schedule(small)


def test_two_streams_or_bytes_behind_the_stream_are_refused(small: Path) -> None:
    whole = small.read_bytes()
    for behind in (b"x", whole):
        small.write_bytes(whole + behind)
        with pytest.raises(BlockTableError, match="more behind the end of the stream"):
            load_schedule(small)


def test_an_archive_of_the_zipfile_module_is_read(small: Path) -> None:
    """The entries are those that other tools see, too."""
    with zipfile.ZipFile(io.BytesIO(plain(small))) as archive:
        assert archive.namelist() == [f"{name}.npy" for name in ("header", *ARRAYS)]
