"""One line for the user."""

import pytest

from octavo.trainer.errors import reason


@pytest.mark.parametrize(
    "error, text",
    [
        (PermissionError(13, "Permission denied", "runs/a"), "runs/a: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("no such file on the hub"), "no such file on the hub"),
        (ValueError("two\n  lines"), "two lines"),
        (KeyError("added_tokens"), "KeyError: 'added_tokens'"),
    ],
)
def test_reason(error, text):
    assert reason(error) == text
