"""A gather's accesses: only what is new, whatever the context."""

from __future__ import annotations

from tests.backends_under_test import MakeTables
from tests.kernels.checked_memory import CheckedMemory
from tests.kernels.full_copy import PAGED, SLIDING, FullCopy

GROUPS = (PAGED, SLIDING)


def accesses(life: FullCopy, memory: CheckedMemory, batch: list[int], computed: int) -> int:
    """Loads and stores of a gather of these rows, checked like any other."""
    life.tables.apply_staged_writes()
    before = sum(memory.accesses.values())
    result = life.gather(batch, computed)
    life.check_gathered(batch, computed, result, len(batch))
    return sum(memory.accesses.values()) - before


def test_only_new_columns_are_copied(make_tables: MakeTables, memory: CheckedMemory) -> None:
    life = FullCopy(make_tables, GROUPS)
    for row in range(3):
        life.start(row, 9)
    first = accesses(life, memory, [0, 1, 2], 0)
    steady = accesses(life, memory, [0, 1, 2], 0)
    assert steady == accesses(life, memory, [0, 1, 2], 3)
    # 3 rows of 9 columns in 2 groups were read and written once.
    assert first - steady == 2 * 3 * 9 * 2
    life.append(1, [1, 2])
    assert accesses(life, memory, [0, 1, 2], 0) - steady == 2 * 3
    life.start(2, [4, 4])  # 9 cells of each group change, of which 4 come from the table
    assert accesses(life, memory, [0, 1, 2], 0) - steady == 2 * (9 + 4)
    swapped = accesses(life, memory, [1, 0, 2], 0)
    assert swapped - steady == (10 + 10) + (10 + 9) + (11 + 11) + (11 + 9)
    # Two columns of each row fall behind the window of 10 tokens, and come back.
    assert accesses(life, memory, [1, 0, 2], 18) - steady == 6
    assert accesses(life, memory, [1, 0, 2], 0) - steady == 2 * 6


def test_cost_does_not_grow_with_the_context(
    make_tables: MakeTables, memory: CheckedMemory
) -> None:
    costs = set()
    for held in (1, 11):
        life = FullCopy(make_tables, GROUPS)
        life.start(0, held)
        life.start(1, held)
        accesses(life, memory, [0, 1], 0)
        life.append(0, 1)
        costs.add(accesses(life, memory, [0, 1], 0))
    assert len(costs) == 1
