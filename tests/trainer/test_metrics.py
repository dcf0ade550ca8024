"""The console: what cannot be shown stops nothing."""

import os

import pytest
from rich.console import Console
from training_runs import in_a_child

from octavo.trainer.metrics import Display


def full_disk():
    return open("/dev/full", "w")


def no_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("target", [full_disk, no_reader])
def test_a_console_that_takes_no_text_stops_nothing(target):
    def show():
        file = target()
        for _ in range(2):
            Display(Console(file=file)).line("warning: the disk is full")
        with pytest.raises(OSError):
            file.close()  # it did refuse

    assert in_a_child(show) == 0  # rich points standard output elsewhere when a pipe breaks


def test_a_line_is_printed_as_it_is(capsys):
    Display().line("[bold]kept[/bold] " + "x" * 200)
    assert capsys.readouterr().out == "[bold]kept[/bold] " + "x" * 200 + "\n"
