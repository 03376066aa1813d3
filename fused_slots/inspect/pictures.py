"""A picture of the block tables over a replayed schedule: rows, columns, blocks and events."""

from __future__ import annotations

import colorsys
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fused_slots.faults import BackendUnavailableError, InvalidArgumentError
from fused_slots.groups import NULL_BLOCK_ID
from fused_slots.recording.schedule import Schedule

if TYPE_CHECKING:
    from fused_slots.recording.replay import ReplayedStep

NUM_SNAPSHOTS = 6

_MAX_GROUPS = 64
_MAX_CELLS = 1 << 25
"""Rows x steps: what a picture can hold of a schedule, and a reader of it can see."""

_EVENT = re.compile(r"(prefix hit|preempted|resumed|aborted)(?: \d+ of)? (\d+)")
_MARKERS = {
    "prefix hit": ("^", "#0b7a3b"),
    "preempted": ("X", "#c1121f"),
    "resumed": ("o", "#1d4ed8"),
    "aborted": ("s", "#111111"),
}
_CAPTION = (
    "Small pictures: each group's table as it was gathered, row by column, in the request's "
    "colour. Darker: another row holds the same block (a shared prefix). "
    "Grey: the null block, freed behind the window. White: not filled."
)
_EMPTY = (1.0, 1.0, 1.0)
_FREED = (0.86, 0.86, 0.86)

Image = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Snapshot:
    """The live rows of every group at one step: what a batch's rows show, and whose they are."""

    step: int
    row_owner: dict[int, int]
    columns: list[dict[int, npt.NDArray[np.int64]]]


class Film:
    """Collects what the picture shows while a replay runs; `draw` makes the picture.

    Args:
        schedule: the schedule that is replayed.

    Raises:
        InvalidArgumentError: the schedule is too large for one picture.
    """

    def __init__(self, schedule: Schedule) -> None:
        cells = schedule.max_num_reqs * len(schedule)
        if cells > _MAX_CELLS or len(schedule.groups) > _MAX_GROUPS:
            raise InvalidArgumentError(
                "picture",
                expected=f"at most {_MAX_GROUPS} groups and {_MAX_CELLS} rows x steps",
                actual=f"{len(schedule.groups)} and {schedule.max_num_reqs} x {len(schedule)}",
            )
        self.schedule = schedule
        last = len(schedule) - 1
        self._moments = {round(last * (k + 1) / NUM_SNAPSHOTS) for k in range(NUM_SNAPSHOTS)}
        self._snapshots: list[_Snapshot] = []
        self._owners = np.full((schedule.max_num_reqs, len(schedule)), -1, np.int64)
        self._blocks_in_use = np.zeros((len(schedule.groups), len(schedule)), np.int64)
        self._events: list[tuple[str, int, int]] = []
        self._last_row: dict[int, int] = {}

    def add(self, replayed: ReplayedStep) -> None:
        """Take in one replayed step."""
        step, index = replayed.step, replayed.index
        rows, request_ids = step.idx_mapping.tolist(), step.request_ids.tolist()
        self._owners[rows, index] = request_ids
        self._blocks_in_use[:, index] = replayed.blocks_in_use
        row_before = dict(self._last_row)
        self._last_row.update(zip(request_ids, rows, strict=True))
        for text in step.events:
            event = _EVENT.match(text)
            if event is None:
                continue
            # A preempted request is looked up where it was before it came back elsewhere.
            rows_of = row_before if event[1] in ("preempted", "aborted") else self._last_row
            if int(event[2]) in rows_of:
                self._events.append((event[1], index, rows_of[int(event[2])]))
        if index in self._moments:
            self._snapshots.append(self._snapshot(replayed))

    def draw(self, path: str | Path) -> Path:
        """Write the picture; the ending of `path` (.png, .svg) chooses the format.

        Raises:
            BackendUnavailableError: matplotlib is not installed.
            OSError: the file cannot be written.
        """
        require_matplotlib()
        from matplotlib.figure import Figure

        schedule, num_groups = self.schedule, len(self.schedule.groups)
        heights = [3.0, *(_strip_height(len(schedule.groups)),) * num_groups, 2.2]
        figure = Figure(figsize=(15, sum(heights) + 2.2), dpi=110, layout="constrained")
        figure.suptitle(
            f"Block tables over the schedule '{schedule.name}': {len(schedule)} steps, "
            f"{schedule.max_num_reqs} rows, {num_groups} KV cache groups",
            fontsize=13,
        )
        grid = figure.add_gridspec(len(heights), NUM_SNAPSHOTS, height_ratios=heights)
        self._draw_rows(figure.add_subplot(grid[0, :]))
        for g in range(num_groups):
            width = self._shown_columns(g)
            for s, snapshot in enumerate(self._snapshots):
                axes = figure.add_subplot(grid[1 + g, s])
                self._draw_table(axes, g, snapshot, width, first=s == 0)
                if g == 0:
                    axes.set_title(f"step {snapshot.step}", fontsize=9)
        figure.supxlabel(_CAPTION, fontsize=9)
        self._draw_blocks(figure.add_subplot(grid[-1, :]))
        figure.savefig(path)
        return Path(path)

    def _snapshot(self, replayed: ReplayedStep) -> _Snapshot:
        rows = replayed.step.idx_mapping.tolist()
        columns = []
        for g, group in enumerate(self.schedule.groups):
            filled = [
                len(blocks) * group.columns_per_block for blocks in replayed.step.expected_blocks[g]
            ]
            table = replayed.block_tables[g]
            columns.append(
                {row: table[b, :n] for b, (row, n) in enumerate(zip(rows, filled, strict=True))}
            )
        owners = dict(zip(rows, replayed.step.request_ids.tolist(), strict=True))
        return _Snapshot(replayed.index, owners, columns)

    def _shown_columns(self, g: int) -> int:
        rows = (row for snapshot in self._snapshots for row in snapshot.columns[g].values())
        return max((len(row) for row in rows), default=1) or 1

    def _draw_rows(self, axes: Any) -> None:
        image = np.ones((*self._owners.shape, 3))
        for request in np.unique(self._owners[self._owners >= 0]).tolist():
            image[self._owners == request] = _colour(request)
        axes.imshow(image, aspect="auto", interpolation="nearest")
        for kind, (marker, colour) in _MARKERS.items():
            places = [(step, row) for event, step, row in self._events if event == kind]
            if places:
                axes.scatter(
                    *zip(*places, strict=True),
                    marker=marker,
                    s=26,
                    c=colour,
                    edgecolors="white",
                    linewidths=0.5,
                    label=f"{kind} ({len(places)})",
                    zorder=3,
                )
        axes.set_title(
            "Which request each row belongs to (a colour is a request, white is a row that the "
            "step does not use)",
            fontsize=10,
            loc="left",
        )
        axes.set_ylabel("row")
        axes.set_xlabel("step")
        if self._events:
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=4, fontsize=8)
        for snapshot in self._snapshots:
            axes.axvline(snapshot.step, color="black", linewidth=0.6, linestyle=":")

    def _draw_table(
        self, axes: Any, g: int, snapshot: _Snapshot, width: int, *, first: bool
    ) -> None:
        axes.imshow(
            table_image(snapshot.columns[g], snapshot.row_owner, self.schedule.max_num_reqs, width),
            aspect="auto",
            interpolation="nearest",
            extent=(0, width, self.schedule.max_num_reqs, 0),
        )
        axes.tick_params(labelsize=7)
        axes.locator_params(integer=True, nbins=4)
        if first:
            group = self.schedule.groups[g]
            axes.set_ylabel(
                f"{group.name or f'group {g}'}\n{group.kind.label}, K = {group.block_size}",
                rotation=0,
                ha="right",
                va="center",
                fontsize=8,
            )
        else:
            axes.set_yticklabels([])
        if g == len(self.schedule.groups) - 1:
            axes.set_xlabel("column", fontsize=8)

    def _draw_blocks(self, axes: Any) -> None:
        steps = np.arange(self._blocks_in_use.shape[1])
        for g, group in enumerate(self.schedule.groups):
            name = f"{group.name or f'group {g}'} (max {self._blocks_in_use[g].max()})"
            axes.plot(steps, self._blocks_in_use[g], linewidth=1.2, label=name)
        total = self._blocks_in_use.sum(axis=0)
        axes.plot(steps, total, color="black", linewidth=1.6, label=f"all (max {total.max()})")
        pool = self.schedule.num_blocks - 1
        if total.max() > pool / 3:
            axes.axhline(pool, color="#c1121f", linestyle="--", linewidth=1, label=f"pool ({pool})")
        for event, step, _ in self._events:
            if event == "preempted":
                axes.axvline(step, color="#c1121f", alpha=0.25, linewidth=0.8)
        axes.set_xlim(0, max(len(steps) - 1, 1))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("step")
        axes.set_ylabel("blocks")
        axes.set_title(
            "Blocks held by live requests (thin red lines: preemptions)", fontsize=10, loc="left"
        )
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)


def require_matplotlib() -> None:
    """Check that pictures can be drawn here.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise BackendUnavailableError(
            "picture",
            expected="the package matplotlib",
            actual="not installed",
            hint="pip install matplotlib",
        )


def table_image(
    columns: dict[int, npt.NDArray[np.int64]],
    row_owner: dict[int, int],
    num_rows: int,
    width: int,
) -> Image:
    """One block table as an RGB image [num_rows, width, 3].

    A cell has its request's colour, darker where another row holds the same block (a shared
    prefix), grey where the window has passed and the cell is the null block.
    """
    image = np.ones((num_rows, width, 3)) * _EMPTY
    of_rows = [np.unique(ids) for ids in columns.values()]
    held = np.concatenate([*of_rows, np.zeros(1, np.int64)])
    blocks, counts = np.unique(held[held != NULL_BLOCK_ID], return_counts=True)
    shared = blocks[counts > 1]
    for row, ids in columns.items():
        cells = np.tile(_colour(row_owner[row]), (len(ids), 1))
        cells[np.isin(ids, shared)] *= 0.45
        cells[ids == NULL_BLOCK_ID] = _FREED
        image[row, : len(ids)] = cells
    return image


def _colour(request_id: int) -> tuple[float, float, float]:
    """Neighbouring requests get hues far apart: steps of the golden ratio on the colour circle."""
    hue = request_id * 0.618033988749895 % 1.0
    return colorsys.hls_to_rgb(hue, 0.62 + 0.1 * (request_id % 3 - 1), 0.62)


def _strip_height(num_groups: int) -> float:
    return 1.5 if num_groups <= 6 else 1.0
