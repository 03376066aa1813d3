from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fused_slots.host.block_ids import PlainRequest

class Staging:
    def __new__(
        cls,
        plain: Callable[[Any, Any, Any], PlainRequest],
        lengths: npt.NDArray[np.int32],
        generations: npt.NDArray[np.int32],
        largest_ids: npt.NDArray[np.int32],
        cells: npt.NDArray[np.int32],
        limits: npt.NDArray[np.int64],
        /,
    ) -> Staging: ...
    @property
    def pending(self) -> bool: ...
    @property
    def packet_size(self) -> int: ...
    @property
    def num_calls(self) -> int: ...
    @property
    def rows(self) -> list[int]: ...
    @property
    def num_rows(self) -> int: ...
    def stage(
        self,
        req_index: int,
        new_block_ids: Sequence[Sequence[int]],
        overwrite: bool,
        /,
    ) -> None: ...
    def write(
        self,
        req_index: int,
        begins: Sequence[int],
        new_block_ids: Sequence[Sequence[int]],
        /,
    ) -> None: ...
    def clear_row(self, req_index: int, /) -> None: ...
    def pack(self, packet: npt.NDArray[np.int32], /) -> int: ...
    def clear(self) -> None: ...
