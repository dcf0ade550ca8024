"""Files that are written whole or not at all."""

import errno

import pytest

from octavo.trainer.files import write_whole


def test_a_disk_that_refuses_is_one_line_and_the_earlier_file_stays(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    write_whole(file, "first")

    def read_only(path, *arguments, **settings):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    for name in ("write_text", "unlink"):
        monkeypatch.setattr(type(tmp_path), name, read_only)
    with pytest.raises(ValueError, match=f"{file} cannot be written: Read-only file system. Make room"):
        write_whole(file, "second")
    assert file.read_text() == "first"


def test_a_file_gets_its_name_only_when_it_is_whole(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    write_whole(file, "first")

    def killed(path, target):
        assert path.read_text() == "second"
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "second")
    assert file.read_text() == "first"
