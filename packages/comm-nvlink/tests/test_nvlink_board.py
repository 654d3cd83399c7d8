"""Boards, arenas and single steps of the exchange, in C++ on a host, with threads and ThreadSanitizer."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

import comm_core
import comm_nvlink
from comm_core.consensus import Transaction
from comm_core.errors import JointError
from comm_core.group import Group
from comm_core.testing.ranks import run_threads
from comm_nvlink.board import BOARD_BYTES, Boards, share_boards

INCLUDES = [f"-I{Path(package.__file__).parent / 'include'}" for package in (comm_core, comm_nvlink)]
STRICT = [
    "g++",
    "-std=c++17",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
    *INCLUDES,
]


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_boards_and_arenas_under_threads(tmp_path: Path, sanitizer: str) -> None:
    """Torn, overwritten and late records; memory that is given to one owner at a time, and to the late ones first."""
    program = tmp_path / "units"
    # The order of a record's fields is by fences, which ThreadSanitizer does not model; all of them are atomic.
    flags = [f"-fsanitize={sanitizer}", "-g", "-pthread", *(["-Wno-tsan"] if sanitizer == "thread" else [])]
    source = Path(__file__).with_name("host_units.cpp")
    subprocess.run([*STRICT, *flags, "-o", str(program), str(source)], check=True, timeout=100)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_headers_stand_alone_and_the_pool_is_plain_c_plus_plus(tmp_path: Path) -> None:
    """torch calls the pool's functions with its lock held: no CUDA, no Python, nothing that could wait."""
    package = Path(comm_nvlink.__file__).parent
    for header in sorted((package / "include" / "comm_nvlink").iterdir()):
        source = tmp_path / "alone.cpp"
        source.write_text(f"#include <comm_nvlink/{header.name}>\nint main() {{ return 0; }}\n", encoding="utf-8")
        subprocess.run([*STRICT, "-fsyntax-only", str(source)], check=True, timeout=60)
    library = tmp_path / "pool.so"
    command = [*STRICT, "-fPIC", "-shared", "-o", str(library), str(package / "csrc" / "pool.cpp")]
    subprocess.run(command, check=True, timeout=60)
    assert ctypes.CDLL(str(library)).comm_module_info_v1


def shared(group: Group) -> tuple[int, int]:
    """Every rank writes its board; the others read it."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with Transaction(group, "share boards") as stages:
        boards = share_boards(stages)
        assert isinstance(boards, Boards)
        ctypes.memset(boards.addresses[group.rank] + BOARD_BYTES - 1, group.rank + 1, 1)
        group.barrier("written")
        last = [ctypes.c_uint8.from_address(address + BOARD_BYTES - 1).value for address in boards.addresses]
        assert last == [rank + 1 for rank in range(group.size)]
        group.barrier("read")
        teardown = stages.commit()
    teardown.close()
    assert boards.addresses == ()
    boards.close()
    return before, len(last)


def test_boards_are_one_memory_for_all(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert [count for _, count in run_threads(3, shared)] == [3, 3, 3]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_rank_that_can_not_make_a_board_is_named_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("comm_nvlink.board.os.ftruncate", full)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def rank(group: Group) -> str:
        with pytest.raises(JointError) as caught, Transaction(group, "share boards") as stages:
            share_boards(stages)
        return str(caught.value)

    texts = run_threads(2, rank)
    assert len(set(texts)) == 1 and "No space left on device" in texts[0] and "make a board" in texts[0]
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_board_is_closed_where_another_rank_can_not_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    places = iter([0, 1])

    def one_fails(name: str, flags: int) -> int:
        if next(places):
            raise OSError(24, "Too many open files")
        return create(name, flags)

    monkeypatch.setattr("comm_nvlink.board.os.memfd_create", one_fails)

    def rank(group: Group) -> None:
        with (
            pytest.raises(JointError, match="Too many open files"),
            Transaction(group, "share boards") as stages,
        ):
            share_boards(stages)

    run_threads(2, rank)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
