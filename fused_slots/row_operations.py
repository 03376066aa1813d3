"""What a runner does to rows: new blocks are staged on the host, then applied on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fused_slots.backends.base import Step
from fused_slots.base_tables import BaseTables
from fused_slots.faults import InvalidArgumentError
from fused_slots.host.block_ids import null_ids
from fused_slots.layout import pool_sizes


class RowOperations(BaseTables):
    """The calls that change rows."""

    def append_block_ids(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
    ) -> None:
        """Stage one request's new blocks; the device sees them after `apply_staged_writes`.

        All or nothing: after an error no group's row has changed.

        Args:
            req_index: the request's row.
            new_block_ids: per group, a list of allocation block ids. Under kernel splitting each
                id k becomes the columns k*n ... k*n + n - 1.
            overwrite: start the row anew with these blocks instead of appending them.

        Raises:
            InvalidArgumentError: no such row, or not one list per group.
            BlockIdError: an id is negative, outside the pool, or has slots beyond slot_dtype.
            RowCapacityError: the row has too few columns; names request, group and the numbers.
        """
        if self._waiting:
            self._carry_out()
        if self.redirect_writes_to_null_block:
            new_block_ids = null_ids(new_block_ids)
        self._rows.stage(req_index, new_block_ids, overwrite)

    def resize_pools(self, num_blocks: int | Sequence[int | None] | None) -> None:
        """Tell the sizes of the pools anew; appended ids are checked against them from now on.

        Rows keep what they hold.

        Args:
            num_blocks: as at construction.

        Raises:
            ConfigurationError: a pool whose last slot does not fit the slot dtype, or the
                arithmetic of the device; as before then.
            InvalidArgumentError: writes are staged; apply them first.
        """
        self._carry_out()
        if self._rows.pending:
            raise InvalidArgumentError(
                "resize_pools",
                expected="no staged writes",
                actual=f"writes of {self._rows.num_staged_rows} rows",
                hint="Call apply_staged_writes first",
            )
        layout = replace(self.layout, num_blocks=pool_sizes(num_blocks, self.layout.num_groups))
        self._backend.check_layout(layout)
        self._rows.resize_pools(layout)
        self.layout = layout

    def clear_row(self, req_index: int) -> None:
        """Stage a row's release: it holds nothing in any group until blocks are appended to it.

        Cells of state tables, which kernels read by row, become 0 on the device.

        Args:
            req_index: the request's row.

        Raises:
            InvalidArgumentError: no such row.
        """
        if self._waiting:
            self._carry_out()
        self._rows.clear_row(req_index)

    def write_block_ids(
        self,
        req_index: int,
        first_blocks: Sequence[int],
        new_block_ids: Sequence[Sequence[int]],
    ) -> None:
        """Stage a row's blocks from a place on; the row then ends behind them.

        For requests that are rewound, and for a tail that was evicted or not loaded. All or
        nothing, as `append_block_ids`.

        Args:
            req_index: the request's row.
            first_blocks: per group, how many of the row's allocation blocks stay.
            new_block_ids: per group, the allocation block ids that follow; an empty list cuts.

        Raises:
            InvalidArgumentError: no such row, not one entry per group, or more blocks are to stay
                than the row holds.
            BlockIdError, RowCapacityError: as `append_block_ids`.
        """
        if self._waiting:
            self._carry_out()
        if self.redirect_writes_to_null_block:
            new_block_ids = null_ids(new_block_ids)
        self._rows.write(req_index, first_blocks, new_block_ids)

    def apply_staged_writes(self) -> None:
        """Make the staged writes visible on the device: one launch, none if nothing is staged.

        Raises:
            InvalidArgumentError: writes are pending while a graph is being captured.
        """
        staged = self._staged("apply_staged_writes")
        if staged is not None:
            self._launch(Step(staged=staged))
