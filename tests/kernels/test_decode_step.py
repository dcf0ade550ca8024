"""The kernels of a decode step's own steps: the numbers of a few lines of torch."""

import pytest
import torch
from kernel_checks import interpreted, needs_triton

from octavo.kernels.decode_step import advance_, locate


def check_locate(B, device="cpu"):
    """Every row, in the order that is given."""
    table = torch.randint(1000, (B, 9), dtype=torch.int32, device=device)
    positions, order = torch.randint(9 * 16, (B,), device=device), torch.randperm(B, device=device)
    slots, tiles = locate(table, positions, order, 16)
    pages = table.gather(1, (positions // 16)[:, None]).squeeze(1).long()
    assert torch.equal(slots, pages * 16 + positions % 16)
    wanted = torch.stack([order, torch.ones_like(order), positions[order], order], dim=1)
    assert tiles.dtype == torch.int32 and torch.equal(tiles.long(), wanted)


def check_advance(B, stops, device="cpu"):
    """Some stop, some reach their last position, some had ended before; a neighbour's columns stay as they are."""
    state = {
        "step": torch.tensor([3]),
        "sampled": torch.full((8, B + 2), -1),
        "logprobs": torch.full((8, B + 2), 7.0),
        "tokens": torch.randint(100, 200, (B,)),
        "positions": torch.randint(50, (B,)),
    }
    last, running = state["positions"] + torch.randint(1, 4, (B,)), torch.rand(B) < 0.7
    drawn, drawn_logprobs, stops = torch.randint(6, (B,)), -torch.rand(B), torch.tensor(stops, dtype=torch.int64)
    wanted = {name: x.clone() for name, x in state.items()}
    going = running & ~torch.isin(drawn, stops) & (state["positions"] + 1 < last)
    wanted["sampled"][3, :B], wanted["logprobs"][3, :B], wanted["step"] = drawn, drawn_logprobs, torch.tensor([4])
    wanted["tokens"] = torch.where(going, drawn, wanted["tokens"])
    wanted["positions"] += going
    assert B < 9 or (going.any() and (running & ~going).any() and (~running).any())
    found = {name: x.to(device) for name, x in state.items()}
    running = running.to(device)
    advance_(drawn.to(device), drawn_logprobs.to(device), stops.to(device), *found.values(), last.to(device), running)
    assert torch.equal(running.cpu(), going)
    for name, x in wanted.items():
        assert torch.equal(found[name].cpu(), x), name


@needs_triton
def test_in_the_interpreter():
    interpreted(
        "from test_decode_step import *\n"
        "for rows in (1, 5, 40):\n"
        "    check_locate(rows)\n"
        "    check_advance(rows, [2, 5])\n"
        "check_advance(40, [])\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 100, 512])
def test_on_a_gpu(rows):
    check_locate(rows, "cuda")
    check_advance(rows, [2, 5], "cuda")
    check_advance(rows, [], "cuda")
