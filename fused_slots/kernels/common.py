"""Device functions that the kernels of every target call: plain arguments, no target's forms."""

import triton
import triton.language as tl

from fused_slots.kernels.layout import PAD, TOKENS_OVER_CAPACITY


@triton.jit
def pad_tail(slots_ptr, begin, capacity, program, num_programs, PAD_TILE: tl.constexpr):
    """Write PAD to [begin, capacity) of one group's slots, dealt to num_programs programs."""
    lanes = tl.arange(0, PAD_TILE)
    for first in range(begin + program * PAD_TILE, capacity, num_programs * PAD_TILE):
        token = first + lanes
        value = tl.full([PAD_TILE], PAD, slots_ptr.dtype.element_ty)
        tl.store(slots_ptr + token, value, mask=token < capacity)


@triton.jit
def count_cut_tokens(faults_ptr, g, num_groups, given, mapped):
    """Count the tokens that the batch names and the output or the positions do not hold."""
    if given > mapped:
        counter = faults_ptr + TOKENS_OVER_CAPACITY * num_groups + g
        tl.atomic_add(counter, (given - mapped).to(faults_ptr.dtype.element_ty))


@triton.jit
def changed_columns(kept, filled, nulled, old_filled, old_nulled, width):
    """The range of columns of each batch entry that a gather must write, empty = none.

    An entry that kept its row and the row's generation needs the columns between the old and the
    new extent, and those between the old and the new number of nulled columns; another one needs
    all it has and all it had.

    Returns:
        First column and end; an end of 0 or below the first column = none.
    """
    same_length, same_nulls = old_filled == filled, old_nulled == nulled
    low = tl.where(same_length, width, tl.minimum(old_filled, filled))
    low = tl.minimum(low, tl.where(same_nulls, width, tl.minimum(old_nulled, nulled)))
    high = tl.where(same_length, 0, tl.maximum(old_filled, filled))
    high = tl.maximum(high, tl.where(same_nulls, 0, tl.maximum(old_nulled, nulled)))
    low = tl.where(kept, low, 0)
    high = tl.where(kept, high, tl.maximum(old_filled, filled))
    return low, high
