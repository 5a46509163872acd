"""Whole files: what takes the place of a file, and what of links, devices and pipes; files of others as data."""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distca_hf.analysis.profiles.__main__ import write
from distca_hf.analysis.profiles.cluster_profile import find_profile
from distca_hf.cli import app
from distca_hf.whole_file import lines_of, open_regular, open_to_append, replaced
from support.made_traces import write_run


def written(path: Path, named: bool = False) -> Path:
    with replaced(path, named=named) as unfinished:
        unfinished.write_text("new")
    return path


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_a_new_file_has_the_mode_of_the_umask_and_another_keeps_its_own(mask: int, mode: int, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "there").chmod(0o640)
    with umask(mask):
        modes = [stat.S_IMODE(written(tmp_path / name).stat().st_mode) for name in ("new", "there")]

    assert modes == [mode, 0o640]


@pytest.mark.parametrize("dangles", [False, True])
def test_a_link_that_a_user_has_named_stays(dangles: bool, tmp_path: Path) -> None:
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    if not dangles:
        target.write_text("old")
    written(link, named=True)

    assert (link.is_symlink(), target.read_text()) == (True, "new")


def test_another_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    written(tmp_path / "link")

    assert [(tmp_path / name).read_text() for name in ("link", "target")] == ["new", "old"]
    assert not (tmp_path / "link").is_symlink()


def test_a_pipe_that_a_user_has_named_gets_the_file(tmp_path: Path) -> None:
    pipe, seen = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()))
    reader.start()
    written(pipe, named=True)
    reader.join()

    assert (seen, pipe.is_fifo()) == (["new"], True)


def test_a_report_leaves_a_device_and_a_link_in_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the name that a report has by itself, a link is somebody else's, and gives way."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", ranks=1)
    victim, null = tmp_path / "victim", tmp_path / "null"
    victim.write_text("precious")
    null.symlink_to("/dev/null")
    (tmp_path / "report.html").symlink_to(victim)
    (tmp_path / "cluster.json").symlink_to(victim)
    for line in (["-o", str(null)], []):
        assert CliRunner().invoke(app, ["report", "run", *line]).exit_code == 0
    write(find_profile("h200"), Path("cluster.json"))

    assert null.is_symlink()
    assert Path("/dev/null").is_char_device()
    assert victim.read_text() == "precious"


def test_only_regular_files_are_opened_and_no_link_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"a"
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a device or a pipe"):
            open_regular(path)
    with open_to_append(tmp_path / "file") as to:
        to.write(b"b")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=name):
            open_to_append(tmp_path / name)
    assert (tmp_path / "file").read_text() == "ab"


def test_a_line_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc\nabcd\n")
    with open_regular(tmp_path / "file") as file, pytest.raises(OSError, match="a line of more than 4 bytes"):
        assert list(lines_of(file, 4)) == [b"abc\n"]
