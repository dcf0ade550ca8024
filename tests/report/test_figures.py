"""The parts that figures are drawn with."""

import re

import numpy as np
import pytest

from octavo.report.figures import (
    MAX_POINTS,
    Chart,
    LogAxis,
    binned,
    draw_line,
    drawing,
    line_style,
    running_mean,
    thinned,
    value_axis,
)


def new_axes():
    from matplotlib.figure import Figure

    return Figure().add_subplot()


def test_running_mean_takes_fewer_values_at_the_ends():
    assert running_mean([1.0, 2.0, 3.0, 4.0, 8.0], 3).tolist() == [1.5, 2.0, 3.0, 5.0, 6.0]
    assert running_mean([7.0], 1).tolist() == [7.0]


def test_thinning_keeps_the_extremes_in_their_order():
    values = [0.0] * 10_000
    values[7777], values[7778] = 5.0, -3.0
    steps, kept = thinned(range(10_000), values)
    assert len(steps) <= 2 * MAX_POINTS and steps == sorted(set(steps))
    assert kept[steps.index(7777)] == 5.0 and kept[steps.index(7778)] == -3.0
    assert thinned([3, 4], [1.0, 2.0]) == ([3, 4], [1.0, 2.0])


def test_bins_are_means_of_their_steps_and_nan_where_there_is_none():
    edges, means = binned([0, 1, 2, 5], np.asarray([[1.0], [2.0], [3.0], [9.0]]))
    assert edges == [-0.5, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert np.array_equal(means[:, 0], [1.0, 2.0, 3.0, np.nan, np.nan, 9.0], equal_nan=True)
    edges, means = binned(range(10, 130), np.arange(120.0)[:, None])  # two steps a bin
    assert edges[:2] == [9.5, 11.5] and edges[-1] == 129.5
    assert means[:, 0].tolist() == [0.5 + 2 * index for index in range(60)]


def test_a_logarithmic_axis_shows_zeros_on_a_line_of_their_own():
    axis = LogAxis([0.0, 0.002, 0.3])
    assert axis.place([0.0, 0.002]) == [1e-4, 0.002]
    axes = new_axes()
    axis.apply(axes)
    ticks = dict(zip(axes.get_yticks(), (label.get_text() for label in axes.get_yticklabels()), strict=True))
    assert ticks == pytest.approx({1e-4: "0", 1e-3: "1e-3", 1e-2: "1e-2", 1e-1: "1e-1", 1.0: "1"})
    low, high = axes.get_ylim()
    assert low < 1e-4 and high > 1.0


def test_a_logarithmic_axis_without_zeros_has_no_zero():
    axes = new_axes()
    LogAxis([1.0]).apply(axes)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "1e1"]


def test_values_start_from_zero_unless_one_is_negative():
    for values, low in (([0.4, 0.5], 0.0), ([0.0, 0.0], 0.0), ([-0.1, 0.5], -0.13)):
        axes = new_axes()
        axes.plot([0, 1], values)
        value_axis(axes, "share")
        assert axes.get_ylim()[0] == pytest.approx(low) and axes.get_ylim()[1] > max(values)
        assert all(label.get_text().endswith("%") for label in axes.get_yticklabels())


def test_a_long_line_is_smoothed_over_a_tenth_of_its_points_and_a_short_one_marked():
    axes = new_axes()
    y = [0.0, 3.0] * 15
    draw_line(axes, range(30), y, line_style("red", ""), smooth=True)
    raw, bold = axes.lines
    assert raw.get_ydata().tolist() == y and raw.get_alpha() < 1.0
    assert bold.get_ydata()[:3].tolist() == [1.5, 1.0, 2.0]  # three at a time
    draw_line(axes, [5], [1.0], line_style("red", ""), smooth=True)
    assert axes.lines[-1].get_marker() == "o"


def test_a_picture_takes_the_colours_of_the_page_and_shares_no_id():
    chart = Chart(title="Some title", caption="")
    for label in ("a", "b"):
        with drawing(chart, label) as axes:
            axes.plot([0, 1], [1, 2], "o")
    texts = [picture.svg for picture in chart.pictures]
    ids = [re.findall(r'\bid="([^"]+)"', svg) for svg in texts]
    assert ids[0] and not set(ids[0]) & set(ids[1])
    for svg, own in zip(texts, ids, strict=True):
        assert svg.startswith('<svg role="img" aria-label="Some title"') and "<metadata" not in svg
        assert "currentColor" in svg and "var(--grid)" in svg and "#01020" not in svg
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', svg)) <= set(own)
