from collections import Counter

import pytest

from octavo.tasks.order import ProblemOrder


def places(order, start, stop):
    return [order.problem(place) for place in range(start, stop)]


def test_without_weights_every_epoch_is_a_shuffle_of_its_own():
    order = ProblemOrder([10], (), seed=3)
    first, second = places(order, 0, 10), places(order, 10, 20)
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert places(ProblemOrder([10], (), seed=3), 7, 13) == (first + second)[7:13]  # a cursor is all it takes
    assert places(ProblemOrder([10], (), seed=4), 0, 10) != first


def test_weights_set_the_share_of_each_part_in_every_epoch():
    order = ProblemOrder([10, 100, 1000], (1.0, 2.0, 0.5), seed=0)
    assert order.counts == [10, 20, 5]
    seen = places(order, 0, 35 * 200)
    for epoch in range(200):
        drawn = seen[35 * epoch : 35 * (epoch + 1)]
        assert len(set(drawn)) == 35  # none twice
        assert Counter((problem >= 10) + (problem >= 110) for problem in drawn) == {0: 10, 1: 20, 2: 5}
    counts = Counter(seen)
    assert {counts[problem] for problem in range(10)} == {200}
    assert {counts[problem] for problem in range(10, 110)} == {40}  # every problem has its turn, equally often
    assert {counts[problem] for problem in range(110, 1110)} == {1}
    assert seen[:35] != seen[35:70]


@pytest.mark.parametrize("sizes, weights", [((1, 1), (1.0, 1e-9)), ((3, 7), (1e9, 1.0)), ((5, 5), (1.0, 3.0))])
def test_no_part_is_left_out_and_none_comes_twice(sizes, weights):
    order = ProblemOrder(sizes, weights, seed=1)
    assert all(1 <= count <= size for count, size in zip(order.counts, sizes, strict=True))
    assert set(places(order, 0, sum(order.counts) * max(sizes))) == set(range(sum(sizes)))
