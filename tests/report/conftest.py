"""What a chart drew, as numbers. matplotlib is imported in functions: a GPU machine may lack it."""

from typing import Any

import pytest


@pytest.fixture
def drawn(monkeypatch) -> list[Any]:
    """The axes of every picture so far, kept when matplotlib writes it."""
    from matplotlib.figure import Figure

    kept: list[Any] = []
    save = Figure.savefig

    def keep(figure, *arguments, **settings):
        save(figure, *arguments, **settings)
        kept.extend(figure.axes)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept
