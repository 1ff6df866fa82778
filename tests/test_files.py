"""Files are whole or untouched, written into where they cannot be replaced, and refused before the work."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mdmi_fast.files import check_file, check_folder, open_output, read_json, replace_file, same_file


def write(path: Path, text: str = "new") -> None:
    with replace_file(path) as temporary:
        temporary.write_text(text)


def stream(path: Path, text: str = "new") -> None:
    with open_output(path) as file:
        file.write(text)


WAYS = pytest.mark.parametrize("way", [write, stream])


@contextmanager
def read_from(pipe: Path) -> Iterator[list[str]]:
    """Another thread that reads a pipe to its end."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    yield found
    reader.join(timeout=60)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, for whom nothing is forbidden."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@WAYS
def test_a_pipe_stays_a_pipe_and_its_reader_gets_all(tmp_path: Path, way: Callable[[Path], None]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_file(pipe)  # and the reader that comes next has not been woken for nothing
    with read_from(pipe) as found:
        way(pipe)
    assert found == ["new"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_reader_of_a_pipe_gets_lines_as_they_are_flushed(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    lines: list[str] = []
    arrived = threading.Event()

    def read() -> None:
        with pipe.open() as file:
            for line in file:
                lines.append(line)
                arrived.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open_output(pipe) as file:
        file.write("first\n")
        file.flush()
        assert arrived.wait(timeout=60)
        assert lines == ["first\n"]
    reader.join(timeout=60)


@WAYS
def test_a_link_stays_and_the_file_behind_it_is_replaced_with_its_permissions(
    tmp_path: Path, way: Callable[[Path], None]
) -> None:
    (tmp_path / "there").mkdir()
    target, link, dangling = tmp_path / "there" / "file", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to("there/file")
    dangling.symlink_to("there/none")
    for path in (link, dangling):
        check_file(path)
        way(path)
        assert path.is_symlink()
        assert path.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["dangling", "file", "link", "none", "there"]


@WAYS
def test_devices_are_written_into(way: Callable[[Path], None]) -> None:
    for path in (Path("/dev/null"), Path("/dev/full")):
        check_file(path)
    way(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space left") as full:
        way(Path("/dev/full"))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, "/dev/full")
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("way", ["replace_file", "open_output"])
def test_standard_output_by_its_path_is_the_open_file_and_not_emptied(tmp_path: Path, name: str, way: str) -> None:
    code = f"""
from pathlib import Path
from mdmi_fast.files import *
print("second")
with {way}(Path("{name}")) as file:
    (file.write if hasattr(file, "write") else file.write_text)("third\\n")
print("fourth")
"""
    log = tmp_path / "log"
    log.write_text("first\n")
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert log.read_text() == "first\nsecond\nthird\nfourth\n"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_what_cannot_be_written_is_refused_before_the_work_and_left_as_it_is(open_folder: Path) -> None:
    file, link, loop = open_folder / "file", open_folder / "link", open_folder / "loop"
    file.write_text("kept")
    link.symlink_to(open_folder)
    loop.symlink_to("loop")
    locked = open_folder / "locked"
    locked.mkdir()
    (locked / "file").touch()
    locked.chmod(0o555)
    read_end, write_end = os.pipe()
    file.chmod(0o444)
    try:
        for path, reason in (
            (open_folder, "is a folder"),
            (link, "is a folder"),
            (Path(), "is a folder"),
            (file / "below", "Not a directory"),
            (file / "far" / "below", "Not a directory"),
            (loop, "Too many levels"),
            (open_folder / ("x" * 300), "File name too long"),
            (file, "may not be written"),
            (locked / "new", "Permission denied"),
            (locked / "new" / "file", "Permission denied"),
            (Path(f"/dev/fd/{read_end}"), "may not be written"),
        ):
            with as_nobody(), pytest.raises(OSError, match=reason) as refused:
                check_file(path)
            assert str(refused.value.filename) == str(path)
        for path, reason in (
            (file, "is no folder"),
            (file / "below", "cannot be made, .*file is no folder"),
            (locked, "Permission denied"),
            (locked / "new", "Permission denied"),
        ):
            with as_nobody(), pytest.raises(OSError, match=reason) as refused:
                check_folder(path)
            assert str(refused.value.filename) == str(path)
        with pytest.raises(IsADirectoryError), replace_file(open_folder):
            pytest.fail("the work has begun")
    finally:
        os.close(read_end)
        os.close(write_end)
    assert file.read_text() == "kept"
    assert sorted(path.name for path in open_folder.rglob("*")) == ["file", "file", "link", "locked", "loop"]


def test_what_can_be_written_passes_and_leaves_no_trace(tmp_path: Path) -> None:
    for path in (tmp_path / "file", tmp_path / "new" / "er" / "file", tmp_path / ("x" * 250 + ".json")):
        check_file(path)
        check_folder(path.parent)
        assert list(tmp_path.iterdir()) == []
        write(path)
        assert path.read_text() == "new"
        path.unlink()
        for folder in (tmp_path / "new" / "er", tmp_path / "new"):
            if folder.exists():
                folder.rmdir()
    check_file(None)
    check_folder(None)


def test_a_disk_that_fills_up_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        for way in (write, stream):
            with pytest.raises(OSError, match="File too large") as full:
                way(path, "x" * (1 << 20))  # type: ignore[operator]
            assert (full.value.errno, full.value.filename) == (errno.EFBIG, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_two_outputs_are_the_same_file_however_they_are_spelled(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    assert same_file(tmp_path / "file", tmp_path / "link")
    assert same_file(tmp_path / "file", tmp_path / "x" / ".." / "file")
    assert not same_file(tmp_path / "file", tmp_path / "other")
    assert not same_file(Path("/dev/null"), Path("/dev/null"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[" * 100_000, "maximum recursion depth"),
        ('{"a": 1}'.encode("utf-16"), "looks like UTF-16; save it as UTF-8"),
        ('{"a": 1}'.encode("utf-16-be"), "looks like UTF-16; save it as UTF-8"),
        ('{"a": 1}'.encode("utf-32"), "looks like UTF-16; save it as UTF-8"),
        (b'{"a":\n  "\xe9"}', "not UTF-8: byte 4 of line 2 is 0xe9"),
    ],
)
def test_a_file_that_holds_no_json_is_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as error:
        read_json(path)
    assert str(error.value).startswith(f"{path}: not JSON: ")


def test_json_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}\r\n')
    assert read_json(path) == {"a": "\u00e9"}


def test_the_suffix_that_was_asked_for_stays_behind_a_link_and_names_count_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "link.png").symlink_to("without")
    for name in ("link.png", "\N{GRINNING FACE}" * 40 + "." + "\N{GRINNING FACE}" * 20):
        with replace_file(tmp_path / name) as temporary:
            assert temporary.suffix == Path(name).suffix[:13]
            temporary.write_text("written")
        assert (tmp_path / name).read_text() == "written"
