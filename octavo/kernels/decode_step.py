"""What a decode step does beside the decoder, in two kernels: where tokens go, and what follows from those drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.early_launch import begin, early_launch
from octavo.kernels.triton_shim import tl, triton


def locate(page_table: Tensor, positions: Tensor, order: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Where the new token of each sequence goes, and the tiles of attention.

    Args:
        page_table: [B, pages] int32, rows contiguous.
        positions: [B] int64, of the new tokens.
        order: [B] int64, rows in the order of their tiles.
        page_size: tokens in a page.

    Returns:
        Slots [B] int64, and the table of `decode_tiles`, [B, 4] int32.
    """
    B = len(positions)
    slots, tiles = torch.empty_like(positions), torch.empty(B, 4, dtype=torch.int32, device=positions.device)
    _locate_kernel[(1,)](
        page_table, positions, order, slots, tiles, B, page_table.stride(0), PAGE=page_size,
        ROWS=triton.next_power_of_2(B), num_warps=4, **early_launch(positions),
    )  # fmt: skip
    return slots, tiles


def advance_(
    drawn: Tensor,
    drawn_logprobs: Tensor,
    stop_tokens: Tensor,
    step: Tensor,
    sampled: Tensor,
    logprobs: Tensor,
    tokens: Tensor,
    positions: Tensor,
    last_positions: Tensor,
    running: Tensor,
) -> None:
    """Keep what was drawn, and go on to the next token of each sequence that has not ended.

    Args:
        drawn, drawn_logprobs: [B] int64 and fp32.
        stop_tokens: [stops] int64, each ends a sequence.
        step: [1] int64, row of `sampled` and `logprobs`; one more afterwards.
        sampled, logprobs: [steps, rows] int64 and fp32, of which B columns are written.
        tokens, positions, running: [B] int64, int64 and bool, of the last token and whether there is a next one.
        last_positions: [B] int64, of the last token that a sequence may have.
    """
    B = len(drawn)
    _advance_kernel[(1,)](
        drawn, drawn_logprobs, stop_tokens, step, sampled, logprobs, tokens, positions, last_positions, running, B,
        len(stop_tokens), sampled.stride(0), logprobs.stride(0), ROWS=triton.next_power_of_2(B), num_warps=4,
        **early_launch(drawn),
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "stride_table"])
def _locate_kernel(
    table_ptr, positions_ptr, order_ptr, slots_ptr, tiles_ptr, B, stride_table, PAGE: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for all rows."""
    begin(EARLY)
    i = tl.arange(0, ROWS)
    here = i < B
    row = tl.load(order_ptr + i, mask=here, other=0)
    position = tl.load(positions_ptr + row, mask=here, other=0)
    page = tl.load(table_ptr + row * stride_table + position // PAGE, mask=here, other=0).to(tl.int64)
    tl.store(slots_ptr + row, page * PAGE + position % PAGE, mask=here)
    tl.store(tiles_ptr + 4 * i, row.to(tl.int32), mask=here)
    tl.store(tiles_ptr + 4 * i + 1, tl.full([ROWS], 1, tl.int32), mask=here)
    tl.store(tiles_ptr + 4 * i + 2, position.to(tl.int32), mask=here)
    tl.store(tiles_ptr + 4 * i + 3, row.to(tl.int32), mask=here)


@triton.jit(do_not_specialize=["B", "num_stops", "stride_sampled", "stride_logprobs"])
def _advance_kernel(
    drawn_ptr, drawn_logprobs_ptr, stops_ptr, step_ptr, sampled_ptr, logprobs_ptr, tokens_ptr, positions_ptr, last_ptr,
    running_ptr, B, num_stops, stride_sampled, stride_logprobs, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for all rows."""
    begin(EARLY)
    i = tl.arange(0, ROWS)
    here = i < B
    step = tl.load(step_ptr)
    drawn = tl.load(drawn_ptr + i, mask=here, other=-1)
    tl.store(sampled_ptr + step * stride_sampled + i, drawn, mask=here)
    tl.store(logprobs_ptr + step * stride_logprobs + i, tl.load(drawn_logprobs_ptr + i, mask=here), mask=here)
    position = tl.load(positions_ptr + i, mask=here, other=0)
    going = tl.load(running_ptr + i, mask=here, other=0).to(tl.int1)
    going &= position + 1 < tl.load(last_ptr + i, mask=here, other=0)
    for stop in range(num_stops):
        going &= drawn != tl.load(stops_ptr + stop)
    tl.store(running_ptr + i, going, mask=here)
    tl.store(tokens_ptr + i, drawn, mask=here & going)
    tl.store(positions_ptr + i, position + 1, mask=here & going)
    tl.debug_barrier()  # every thread has read the step
    tl.store(step_ptr, step + 1)
