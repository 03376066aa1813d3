"""Parts that show what docs/ascend.md assumes of the hardware."""

from __future__ import annotations

from typing import Any

import torch

from bench.ascend_first_run import kernels
from bench.ascend_first_run.device import Device
from bench.ascend_first_run.note import Note, wrong_if

TILE = 128


def words(device: Device, note: Note) -> dict[str, Any]:
    """Transfers of 1 to 13 words from neighbours into the same 32-byte lines: is a word lost?"""
    programs = 4 * device.cores
    lost = {}
    for size in (1, 2, 3, 5, 8, 13):
        out = device.zeros(programs * size)
        for _ in range(device.few(20)):
            out.fill_(-1)
            device.launch(kernels.write_words, programs, out, device.few(50), WORDS=size)
            expected = torch.arange(programs, dtype=torch.int32).repeat_interleave(size)
            lost[size] = lost.get(size, 0) + int((out.cpu() != expected).sum())
        note({"lost_words": lost})
    return wrong_if(any(lost.values()), {"lost_words": lost})


def lines(device: Device, note: Note) -> dict[str, Any]:
    """64-byte lines of which one program writes half while another reads the other half."""
    programs, turns = 4 * device.cores, 8 * device.few(8)
    found = {"wrong_sums": 0, "wrong_words": 0}
    start = torch.arange(programs // 2 * 16, dtype=torch.int32)
    halves = start.view(-1, 16)
    sums = (halves[:, :8].sum(1) * (turns // 8)).to(torch.int32)
    for _ in range(device.few(50)):
        words_, out = start.to(device.torch), device.zeros(programs // 2)
        device.launch(kernels.write_beside_a_reader, programs, words_, out, turns)
        after = words_.cpu().view(-1, 16)
        found["wrong_sums"] += int((out.cpu() != sums).sum())
        found["wrong_words"] += int((after[:, :8] != halves[:, :8]).sum())
        found["wrong_words"] += int((after[:, 8:] != turns - 1).sum())
        note(found)
    return wrong_if(any(found.values()), found)


def cache(device: Device, note: Note) -> dict[str, Any]:
    """A value that a kernel, a copy from the host or torch wrote, loaded by the next kernel."""
    programs = device.cores
    value, out = device.zeros(8), device.zeros(8 * programs)
    stale = {"kernel": 0, "copy": 0, "torch": 0}
    for turn in range(1, 3 * device.few(100) + 1):
        writer = list(stale)[turn % 3]
        if writer == "kernel":
            device.launch(kernels.publish, 1, value, turn)
        elif writer == "copy":
            value.copy_(torch.full((8,), turn, dtype=torch.int32))
        else:
            value.fill_(turn)
        device.launch(kernels.observe, programs, value, out)
        stale[writer] += int((out.cpu() != turn).sum())
    note({"stale": stale})
    return wrong_if(any(stale.values()), {"stale": stale})


def events(device: Device, note: Note) -> dict[str, Any]:
    """Selects, ranges and reductions, whose bodies use events of their own, with the compiler's own
    events around them and with barriers in their place. A lost one hangs or gives a wrong tile."""
    programs, tiles = device.cores, device.few(16)
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 1000, (programs, tiles, TILE), generator=random, dtype=torch.int32)
    lanes, expected = torch.arange(TILE, dtype=torch.int32), torch.empty_like(x)
    least = torch.zeros(programs, 1, dtype=torch.int32)
    for tile in range(tiles):
        kept = torch.maximum(x[:, tile], least)
        total = torch.maximum(kept, lanes).sum(1, keepdim=True)
        least = (total % 97).to(torch.int32)
        expected[:, tile] = kept + least
    wrong: dict[str, int] = {}
    given, out = x.reshape(-1).to(device.torch), device.zeros(x.numel())
    for name, options in (("events", {}), ("barriers", {"inject_barrier_all": True})):
        for _ in range(device.few(100)):
            out.fill_(-1)
            device.launch(
                kernels.select_and_reduce, programs, given, out, tiles, TILE=TILE, **options
            )
            wrong[name] = wrong.get(name, 0) + int((out.cpu() != expected.reshape(-1)).sum())
        note({"wrong_elements": wrong})
    return wrong_if(any(wrong.values()), {"wrong_elements": wrong})


def modes(device: Device, note: Note) -> dict[str, Any]:
    """int64 -> int32 beyond its range, and division by float32: kernels stand either behaviour."""
    wide = torch.arange(TILE, dtype=torch.int64) * (2**31 // 16) - 2**32
    numbers = torch.arange(TILE, dtype=torch.int32) * 131071 + 2**23
    out, quotients = device.zeros(2 * TILE), device.zeros(TILE)
    found: dict[str, Any] = {"off_by_one": 0, "off_by_more": 0}
    for divisor in (3, 7, 48, 96, 144, 640):
        out[TILE:] = numbers.to(device.torch)
        device.launch(
            kernels.narrow_and_divide, 1, wide.to(device.torch), divisor, out, quotients, TILE=TILE
        )
        off = (quotients.cpu().long() - numbers.long() // divisor).abs()
        found["off_by_one"] += int((off == 1).sum())
        found["off_by_more"] += int((off > 1).sum())
    narrow = out[:TILE].cpu()
    wraps = ((wide + 2**31) % 2**32 - 2**31).to(torch.int32)
    known = {"wraps": wraps, "saturates": wide.clamp(-(2**31), 2**31 - 1).to(torch.int32)}
    found["int64_to_int32"] = [n for n, v in known.items() if torch.equal(narrow, v)] or "neither"
    note(found)
    return wrong_if(found["off_by_more"] or found["int64_to_int32"] == "neither", found)


def dealing(device: Device, note: Note) -> dict[str, Any]:
    """Two long programs among short ones: as long as two if they share a core, else as long as one.

    Dealt in turn, programs 0 and `cores` share a core, and 0 and 1 do not.
    """
    cores, steps = device.cores, device.few(2000)
    links, out = _links(device), device.zeros(16 * cores)
    times = {}
    for name, second in (("one", 0), ("neighbours", 1), ("a wave apart", cores)):
        times[name] = device.microseconds(
            lambda second=second: device.launch(
                kernels.chase, 2 * cores, links, out, steps, 0, second
            ),
            5, 10,
        )  # fmt: skip
        note({"us": times})
    in_turn = times["a wave apart"] > 1.5 * times["neighbours"]
    return {"us": times, "in_turn": in_turn}


def _links(device: Device) -> torch.Tensor:
    """A ring through 4,096 words, each in another line than the one before."""
    number = 4096
    return ((torch.arange(number) + 1040) % number).to(torch.int32).to(device.torch)


def latencies(device: Device, note: Note) -> dict[str, Any]:
    """Nanoseconds of a GM load, of a load and a store of a tile, of a program's start."""
    links, out, cores = _links(device), device.zeros(64 * 8 * 64), device.cores
    found: dict[str, Any] = {}

    def chased(steps: int) -> float:
        return device.microseconds(
            lambda: device.launch(kernels.chase, 1, links, out, steps, 0, 0), 20, 10
        )

    found["gm_load_ns"] = round((chased(device.few(2200)) - chased(device.few(200))) / 2, 1)
    note(found)
    for tile in (8, 128, 2048):
        x, y = device.zeros(tile), device.zeros(tile)

        def copied(turns: int, x: torch.Tensor = x, y: torch.Tensor = y) -> float:
            return device.microseconds(
                lambda: device.launch(kernels.copy_tile, 1, x, y, turns, TILE=len(x)), 20, 10
            )

        took = copied(device.few(440)) - copied(device.few(40))
        found[f"load_and_store_{tile}_ns"] = round(took / 0.4, 1)
        note(found)
    starts = {}
    for waves in (1, 2, 4, 8):
        starts[waves] = device.microseconds(
            lambda waves=waves: device.launch(kernels.do_nothing, waves * cores, out), 50, 10
        )
    found["empty_launch_us_by_waves"] = starts
    found["start_of_a_program_us"] = round((starts[8] - starts[1]) / 7, 3)
    note(found)
    return found
