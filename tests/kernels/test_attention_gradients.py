"""The order in which attention's backward pass on Hopper takes blocks, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from octavo.kernels import gradient_kernels
from octavo.kernels.gradient_kernels import KEYS, ROWS
from octavo.kernels.triton_attention import gradient_tiles

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 300, 1000)


@pytest.fixture
def taken(monkeypatch):
    """The kernels' arithmetic on numbers."""
    numbers = SimpleNamespace(
        where=lambda condition, a, b: a if condition else b, cdiv=lambda a, b: -(-a // b), minimum=min, maximum=max
    )
    for name, value in {"gl": numbers, "_KEYS": KEYS, "_ROWS": ROWS}.items():
        monkeypatch.setattr(gradient_kernels, name, value)
    for name in ("_num_full", "_first_block", "_taken", "_step", "_query"):
        function = getattr(gradient_kernels, name)
        monkeypatch.setattr(gradient_kernels, name, getattr(function, "fn", function))
    return gradient_kernels


@pytest.mark.parametrize("group", [1, 3, 4])
def test_every_block_is_written_once_and_found_again(taken, group):
    lengths = [*LENGTHS, 0, 70]
    tiles = gradient_tiles(torch.tensor([0, *lengths]).cumsum(0), sum(lengths), group)
    assert tiles.keys[:, 1].tolist() == sorted(tiles.queries[:, 1].tolist(), reverse=True)
    positions = [position for _, left, position, _ in tiles.queries.tolist() if left]
    assert positions == sorted(positions, reverse=True)
    written = {}
    for first, left, position, before in tiles.keys.tolist():
        start = taken._first_block(before, position, position + left, group)
        whole = group * taken._num_full(left)
        for step in range(group * -(-left // ROWS)):
            head, tile = taken._taken(step, left, group)
            rows = range(tile * ROWS, (tile + 1) * ROWS)
            assert (step < whole) == (rows[0] >= KEYS and rows[-1] < left), "those that are seen whole come first"
            assert taken._step(head, tile, left, group) == step and start + step not in written
            written[start + step] = first, head, first + tile * ROWS
    assert sorted(written) == list(range(tiles.num_blocks))
    read = []
    for first, left, position, before in tiles.queries.tolist():
        for head in range(group):
            for key_tile in range(position // KEYS + (left > 0)):
                behind = position - key_tile * KEYS
                start = taken._first_block(before, key_tile * KEYS, position + left, group)
                for part in range(-(-min(left, KEYS) // ROWS)):
                    step = taken._step(head, behind // ROWS + part, behind + left, group)
                    assert written[start + step] == (first - behind, head, first + part * ROWS)
                    read.append(start + step)
    assert sorted(read) == sorted(written)


def test_the_order_of_queries_in_a_block(taken):
    """`_keep` swaps the pairs of a thread with the threads of four."""
    order = torch.arange(ROWS).view(2, 4, 4, 2).transpose(1, 2).flatten()
    assert [taken._query(column) for column in range(ROWS)] == order.tolist()


def test_no_sequences():
    tiles = gradient_tiles(torch.tensor([0]), 0, 4)
    assert tiles.queries.shape == tiles.keys.shape == (0, 4) and tiles.num_blocks == 0
