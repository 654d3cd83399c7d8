"""The cache: one build for all processes, whole libraries or none, and nothing from a place that others can write.

The compiler is a fake one that counts; test_jit_compile.py uses the real one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comm_core import _cuda
from comm_core.consensus import joint
from comm_core.errors import ArgumentValueError, JitBuildError, JitCacheError, JitMissingError, JointError
from comm_core.group import Group, thread_groups
from comm_core.jit import build, cache, places, toolchain
from comm_core.jit.cache import Artifact, Cache
from comm_core.jit.libraries import obtain
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.testing.fake_nvcc import FakeNvcc

ARCHS = ("9.0a",)
DEADLINE = 60


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """A counting compiler and an empty cache, both in folders with spaces."""
    fake = FakeNvcc(tmp_path / "the compiler")
    monkeypatch.setenv("COMM_NVCC", str(fake.path))
    monkeypatch.setenv("COMM_CACHE_DIR", str(tmp_path / "the cache"))
    for name in ("COMM_JIT", "COMM_JIT_TIMEOUT_S", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return fake


def module(number: int) -> Any:
    return replace(SELFCHECK, name=f"comm_core_m{number}")


def place() -> Cache:
    return Cache(places.roots()[-1])


def names(folder: str) -> list[str]:
    return sorted(path.name for path in (place().base / folder).iterdir())


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a process that runs `code`, with what this file has imported; it neither imports torch nor this file."""
    text = (
        "import os, signal, sys, time\n"
        "from dataclasses import replace\n"
        "from comm_core.jit import build, cache, libraries\n"
        "from comm_core.jit.selfcheck import SELFCHECK\n"
        f"def get(number=0, **options): return libraries.obtain(replace(SELFCHECK, name=f'comm_core_m{{number}}'), "
        f"{ARCHS!r}, **options)\n"
    ) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", text, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def finish(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    """Wait for children; return what they printed. Kills them at the deadline."""
    try:
        done = [process.communicate(timeout=DEADLINE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), [error for _, error in done]
    return [out.strip() for out, _ in done]


# -- One build ----------------------------------------------------------------------------------------------------


def test_eight_processes_and_three_modules_cold_at_once_compile_each_once(nvcc: FakeNvcc) -> None:
    """L1, issue: 8 ranks on one cold cache, in whatever order they ask."""
    nvcc.take(0.15)
    code = """
    order = [(int(sys.argv[1]) + step) % 3 for step in range(3)]
    print(sorted(str(get(number).path) for number in order))
    """
    printed = finish([child(code, rank) for rank in range(8)])
    assert len(set(printed)) == 1
    assert sorted(nvcc.made()) == ["comm_core_m0", "comm_core_m1", "comm_core_m2"]
    assert len(names("entries")) == 3 and names("staging") == []


def test_threads_of_one_process_share_a_build_and_a_failure(nvcc: FakeNvcc) -> None:
    """Whoever waited for a build that failed gets that failure; whoever comes later tries anew."""
    nvcc.take(0.4)
    nvcc.fail("echo 'm.cu(1): error: no' >&2; sleep 0.3; exit 2")

    def fails(_: int) -> str:
        with pytest.raises(JitBuildError) as caught:
            obtain(SELFCHECK, ARCHS)
        return str(caught.value)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(fails, range(4)))
        assert len(set(texts)) == 1 and "m.cu(1): error: no" in texts[0]
        assert len(nvcc.calls("compile")) == 1
        fails(0)
        assert len(nvcc.calls("compile")) == 2
        nvcc.fail(None)
        assert len({str(item.path) for item in pool.map(lambda _: obtain(SELFCHECK, ARCHS), range(4))}) == 1
    assert nvcc.made() == ["comm_core_selfcheck"]
    assert names("failed") == []


@pytest.mark.parametrize("locks", ["not supported", "ignored"])
def test_on_a_file_system_without_locks_everybody_gets_the_same_library(nvcc: FakeNvcc, locks: str) -> None:
    """L3: two hosts on one network folder; both build, the second drops its own and takes the first's."""
    nvcc.take(0.2)
    code = f"""
    import errno, fcntl
    def flock(descriptor, operation):
        if {locks == "not supported"}: raise OSError(errno.ENOLCK, "no locks")
    fcntl.flock = flock
    print(get().path)
    """
    printed = finish([child(code) for _ in range(2)])
    assert len(set(printed)) == 1 and Path(printed[0]).is_file()
    assert len(names("entries")) == 1 and names("staging") == []
    assert nvcc.made() == ["comm_core_m0"] * 2


def test_a_library_that_is_published_but_not_visible_yet_is_waited_for(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: a network file system goes on saying that there is nothing, for a while."""
    first = obtain(SELFCHECK, ARCHS)
    looks = iter([None] * 6)
    find = Cache.find
    monkeypatch.setattr(Cache, "find", lambda self, *names: next(looks, find(self, *names)))
    monkeypatch.setattr(Cache, "artifacts", lambda self, name: [])
    assert obtain(SELFCHECK, ARCHS) == first
    assert len(nvcc.made()) == 2 and next(looks, "looked six times") == "looked six times"
    assert len(names("entries")) == 1 and names("staging") == []


def test_an_entry_that_a_cleaner_went_through_is_built_again(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaners of old files leave folders with half of their files; a truncated library must not be loaded either."""
    monkeypatch.setattr(cache, "_SETTLE_S", 0.05)
    first = obtain(SELFCHECK, ARCHS)
    damages: list[Callable[[Artifact], object]] = [
        lambda item: item.path.unlink(),
        lambda item: item.path.write_bytes(b""),
        lambda item: (item.folder / "manifest.json").unlink(),
        lambda item: (item.folder / "manifest.json").write_text('{"module": '),
        lambda item: [path.unlink() for path in item.folder.rglob("*") if path.is_file()],
    ]
    for number, damage in enumerate(damages):
        damage(first)
        assert obtain(SELFCHECK, ARCHS).path == first.path
        assert len(nvcc.made()) == number + 2
    assert first.path.read_text() == "made by 13.0.88\n" and names("staging") == []


# -- A builder that is killed, stopped or too slow ----------------------------------------------------------------

STAGES = {
    "holding the lock": "cache.Cache.staging = die",
    "before it compiles": "build._write_inputs = die",
    "while it compiles": "os.environ['BUILDER'] = str(os.getpid())",
    "before it publishes": "cache._settle = die",
    "between two files": "cache._sync = die",
    "once it has published": "cache.Cache.forget_failure = lambda *names: None; rename = cache.Path.rename\n"
    "def renamed(path, target): rename(path, target); die()\ncache.Path.rename = renamed",
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_builder_that_is_killed_leaves_nothing_in_the_way(nvcc: FakeNvcc, stage: str) -> None:
    """L4, V11: at no moment does a kill leave a lock, or a library that is not whole."""
    nvcc.fail('if [ -n "$BUILDER" ]; then kill -9 "$BUILDER"; exit 1; fi')
    killed = child(f"def die(*names): os.kill(os.getpid(), signal.SIGKILL)\n{STAGES[stage]}\nget()")
    killed.communicate(timeout=DEADLINE)
    assert killed.returncode == -signal.SIGKILL
    before = len(nvcc.made())
    started = time.monotonic()
    artifact = obtain(module(0), ARCHS)
    assert time.monotonic() - started < 5
    assert artifact.path.read_text() == "made by 13.0.88\n"
    assert len(nvcc.made()) == before + (stage != "once it has published")
    # What the dead one left in its private folder is gone, once somebody builds the same again.
    assert names("staging") == []


def test_a_builder_that_is_stopped_is_named_to_those_who_wait_in_vain(nvcc: FakeNvcc) -> None:
    """L4: the text names the holder, the lock and the variable; when it goes on, so do they."""
    stopped = child("build.compile_module = lambda *names: os.kill(os.getpid(), signal.SIGSTOP)\nget()")
    try:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        (lock,) = (place().base / "locks").iterdir()
        with pytest.raises(JitBuildError, match=rf"process {stopped.pid} on .*{lock.name}.*COMM_JIT_TIMEOUT_S"):
            obtain(module(0), ARCHS, timeout_s=0.3)
        assert nvcc.made() == []
    finally:
        stopped.kill()
        stopped.communicate(timeout=DEADLINE)
    assert obtain(module(0), ARCHS).path.is_file()
    # Deleting it would let a second process in beside whoever has it open.
    assert lock.is_file()


def test_the_lock_is_a_file_that_is_never_replaced(nvcc: FakeNvcc) -> None:
    obtain(SELFCHECK, ARCHS)
    (path,) = (place().base / "locks").iterdir()
    before = path.stat().st_ino
    shutil.rmtree(place().base / "entries")
    obtain(SELFCHECK, ARCHS)
    assert path.stat().st_ino == before


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def spawned(nvcc: FakeNvcc) -> int:
    """Return the process of a compiler that will not end by itself."""
    file = nvcc.folder / "pid"
    until = time.monotonic() + DEADLINE
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return int(file.read_text())


def test_at_the_deadline_every_process_of_the_build_is_killed(nvcc: FakeNvcc) -> None:
    nvcc.fail('trap "" TERM INT; echo $$ > "$here/pid"; sleep 300 & wait; wait')
    with pytest.raises(JitBuildError, match=r"not built within its deadline.*COMM_JIT_TIMEOUT_S"):
        obtain(SELFCHECK, ARCHS, timeout_s=1.0)
    assert not alive(spawned(nvcc)) and names("staging") == []


def test_an_interrupt_ends_the_build_and_is_passed_on(nvcc: FakeNvcc) -> None:
    """Ctrl-C: no compiler goes on in the background, nothing is left, and it is no failed build."""
    nvcc.fail('echo $$ > "$here/pid"; sleep 300')
    process = child("""
    try: get()
    except KeyboardInterrupt: print("interrupted")
    """)
    compiler = spawned(nvcc)
    process.send_signal(signal.SIGINT)
    assert finish([process]) == ["interrupted"]
    assert not alive(compiler) and names("staging") == [] and names("failed") == []


# -- What went wrong ----------------------------------------------------------------------------------------------


def test_a_failed_build_names_the_first_error_the_command_and_the_log(nvcc: FakeNvcc) -> None:
    """L7."""
    nvcc.fail(
        "echo 'm.cu(3): warning #177-D: declared and not used: no error at all'; "
        "echo 'm.cu(7): error: identifier \"x\" is undefined' >&2; echo '1 error detected' >&2; exit 2",
    )
    module_with_flag = replace(SELFCHECK, flags=("-Werror", "all-warnings"))
    with pytest.raises(JitBuildError) as caught:
        obtain(module_with_flag, ARCHS)
    text, error = str(caught.value), caught.value
    assert "can't be built: m.cu(3): warning" not in text
    assert 'can\'t be built: m.cu(7): error: identifier "x" is undefined' in text
    assert error.command in text and "-c comm_core/csrc/selfcheck.cu" in error.command
    assert error.log in text and "1 error detected" in Path(error.log).read_text()
    nvcc.fail(None)
    obtain(module_with_flag, ARCHS)
    # A failure that was overcome is no longer shown to anybody.
    assert names("failed") == []


@pytest.mark.parametrize(
    ("script", "kind", "hint"),
    [
        ("echo 'Killed'; exit 137", "compile", "memory ran out"),
        ("echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9", "compile", "memory ran out"),
        ("kill -9 $$", "compile", "memory ran out"),
        ("echo 'fatal error: error writing to a.s: No space left on device'; exit 1", "compile", "disk is full"),
        ("echo 'collect2: fatal error: cannot write: Disk quota exceeded'; exit 1", "link", "disk is full"),
        (
            "echo 'nvcc fatal   : Failed to preprocess host compiler properties.'; exit 1",
            "compile",
            r"install a g\+\+ that this CUDA supports, or set NVCC_CCBIN",
        ),
        (
            "echo \"nvcc fatal   : Unsupported gpu architecture 'compute_20'\"; exit 1",
            "compile",
            "COMM_CUDA_ARCH_LIST",
        ),
    ],
)
def test_failures_that_are_no_fault_of_the_source_come_with_advice(
    nvcc: FakeNvcc, script: str, kind: str, hint: str
) -> None:
    """L7: a killed compiler, a full disk, a missing host compiler, an unknown architecture."""
    nvcc.fail(script, kind)
    with pytest.raises(JitBuildError, match=f"hint: .*{hint}"):
        obtain(SELFCHECK, ARCHS)


def test_a_disk_that_fills_up_while_publishing_leaves_nothing(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L8."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_sync", full)
        with pytest.raises(JitCacheError, match="No space left on device"):
            obtain(SELFCHECK, ARCHS)
    assert names("entries") == [] and names("staging") == []
    obtain(SELFCHECK, ARCHS)


# -- When nothing may or can be compiled --------------------------------------------------------------------------


def test_switched_off_the_cache_is_used_and_a_miss_prints_the_command(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Issue: COMM_JIT=off. The command of the text fills this very cache."""
    monkeypatch.setenv("COMM_JIT", "off")
    with pytest.raises(JitMissingError) as caught:
        obtain(SELFCHECK, ("8.0", "9.0a"))
    folder = tmp_path / "the cache"
    assert f"COMM_CACHE_DIR='{folder}' commctl jit warm --arch '8.0;9.0a' comm_core_selfcheck" in str(caught.value)
    assert nvcc.calls("compile") == [] and not folder.exists()
    warmed = obtain(SELFCHECK, ("8.0", "9.0a"), may_build=True)
    assert obtain(SELFCHECK, ("9.0a",)) == warmed
    assert obtain(SELFCHECK, ("8.6",), capability="8.6") == warmed
    with pytest.raises(JitMissingError):
        obtain(SELFCHECK, ("10.0a",), capability="10.0")
    monkeypatch.setenv("COMM_JIT", "none")
    with pytest.raises(ArgumentValueError, match="COMM_JIT must be on or off, got 'none'"):
        obtain(SELFCHECK, ("9.0a",))


def test_what_is_built_is_used_where_there_is_no_compiler_or_only_half_of_one(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6: a runtime image without nvcc, with a cache that the build image has filled."""
    warmed = obtain(SELFCHECK, ARCHS)
    for path in ("/nowhere/nvcc", str(FakeNvcc(nvcc.folder / "half", host="no-such-g++").path)):
        monkeypatch.setenv("COMM_NVCC", path)
        assert obtain(SELFCHECK, ARCHS) == warmed
        with pytest.raises(JitBuildError, match=r"COMM_NVCC|no-such-g"):
            obtain(replace(SELFCHECK, flags=("-DOTHER",)), ARCHS)


def test_a_library_for_more_architectures_does_and_one_of_another_compiler_does_not(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L9, L11: `warm` for a fleet serves each of its devices; after an upgrade it is built anew."""
    fat = obtain(SELFCHECK, ("9.0a", "8.0"))
    assert obtain(SELFCHECK, ("9.0a",)) == fat == obtain(SELFCHECK, ("8.0", "9.0a"))
    assert len(nvcc.made()) == 1
    assert obtain(SELFCHECK, ("9.0",)) != fat
    FakeNvcc(nvcc.folder, version="13.1.0")
    toolchain._found.clear()
    assert obtain(SELFCHECK, ("9.0a",)).archs == ("9.0a",)
    assert len(nvcc.made()) == 3


def test_nothing_is_built_while_a_stream_is_being_captured(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build takes seconds, and loading a module breaks the capture; what is built already is no problem."""

    class Capturing:
        cuda: Any

        def is_initialized(self) -> bool:
            return True

        def is_current_stream_capturing(self) -> bool:
            return True

    fake = Capturing()
    fake.cuda = fake
    with monkeypatch.context() as patch:
        patch.setattr(_cuda, "source", lambda: fake)
        patch.setitem(sys.modules, "torch", object())
        with pytest.raises(
            JitMissingError, match=r"being captured.*commctl jit warm --arch 9\.0a comm_core_selfcheck"
        ):
            obtain(SELFCHECK, ARCHS)
    assert nvcc.calls("compile") == []
    obtain(SELFCHECK, ARCHS)
    monkeypatch.setattr(_cuda, "source", lambda: fake)
    assert obtain(SELFCHECK, ARCHS).path.is_file()


def test_a_rank_that_can_not_build_fails_all_of_them_with_its_reason(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L14: PATH without nvcc on one rank; the others must not go on alone with a library that it does not have."""
    find = toolchain.find

    def find_here() -> toolchain.Toolchain:
        if threading.current_thread().name.endswith("_1"):
            raise JitBuildError("no nvcc was found; looked at PATH")
        return find()

    monkeypatch.setattr(toolchain, "find", find_here)

    def rank(group: Group) -> str:
        with pytest.raises(JointError) as caught:
            joint(group, "build", lambda: str(obtain(module(group.rank), ARCHS).path))
        return str(caught.value)

    groups = thread_groups(3)
    with ThreadPoolExecutor(3, thread_name_prefix="rank") as pool:
        # One task a thread: each of them waits for the others.
        texts = list(pool.map(rank, groups))
    assert len(set(texts)) == 1 and texts[0].startswith("build: rank ") and "no nvcc was found" in texts[0]


# -- Which folder -------------------------------------------------------------------------------------------------


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No variable names a folder; the one for temporary files is private to the test."""
    for name in ("COMM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path


def test_the_explicit_folder_wins_then_xdg_then_the_home(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L8."""
    monkeypatch.setenv("HOME", str(homeless))
    assert [root.path for root in places.roots()] == [homeless / ".cache/comm"]
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/ignored")
    assert [root.path for root in places.roots()] == [homeless / ".cache/comm"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(homeless / "xdg"))
    assert [root.path for root in places.roots()] == [homeless / "xdg/comm"]
    monkeypatch.setenv("COMM_CACHE_DIR", str(homeless / "a/b c"))
    (root,) = places.roots()
    assert (root.path, root.explicit, root.writable) == (homeless / "a/b c", True, True)
    assert root.path.stat().st_mode & 0o777 == 0o700


def _no_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> Any:
        raise KeyError(uid)

    patch.setattr(pwd, "getpwuid", nobody)


def _missing_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HOME", str(home / "gone"))


def _file_in_the_way(home: Path, patch: pytest.MonkeyPatch) -> None:
    (home / ".cache").write_text("")
    patch.setenv("HOME", str(home))


def _read_only_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    # As /proc answers, whoever asks.
    patch.setenv("HOME", "/proc/self")


def _foreign_home(home: Path, patch: pytest.MonkeyPatch) -> None:
    # `sudo` that keeps HOME: the user could replace what root would then run.
    home.chmod(0o777)
    patch.setenv("HOME", str(home))


@pytest.mark.parametrize("breakage", [_no_home, _missing_home, _file_in_the_way, _read_only_home, _foreign_home])
def test_without_a_usable_home_a_private_temporary_folder_is_used(
    breakage: Callable[[Path, pytest.MonkeyPatch], None],
    homeless: Path,
    monkeypatch: pytest.MonkeyPatch,
    nvcc: FakeNvcc,
) -> None:
    """L8: no home in the password file, a home that does not exist, is read-only, or can be written by others."""
    monkeypatch.delenv("COMM_CACHE_DIR")
    home = homeless / "home"
    home.mkdir()
    breakage(home, monkeypatch)
    root = places.roots()[-1]
    assert root.path == homeless / f"tmp/comm-{os.geteuid()}" and root.note
    assert root.path.stat().st_mode & 0o777 == 0o700
    artifact = obtain(SELFCHECK, ARCHS)
    assert root.path in artifact.path.parents
    assert not (homeless / "home/gone").exists()


def test_a_home_that_became_read_only_is_still_read(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, nvcc: FakeNvcc
) -> None:
    """A container with a read-only root file system and a cache in its image."""
    monkeypatch.delenv("COMM_CACHE_DIR")
    monkeypatch.setenv("HOME", str(homeless))
    warmed = obtain(SELFCHECK, ARCHS)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, *names, **more: ".cache" not in str(path) and access(path, *names))
    assert obtain(SELFCHECK, ARCHS) == warmed
    other = obtain(module(0), ARCHS)
    assert homeless / "tmp" in other.path.parents


@pytest.mark.parametrize("place", ["/proc/self/comm-cache", "a file"])
def test_an_explicit_folder_that_can_not_be_used_is_an_error(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: FakeNvcc
) -> None:
    """L8: a variable that somebody set is not ignored."""
    (tmp_path / "a file").write_text("")
    path = place if place.startswith("/") else str(tmp_path / place / "below")
    monkeypatch.setenv("COMM_CACHE_DIR", path)
    with pytest.raises(JitCacheError, match=f"COMM_CACHE_DIR='{path}' can't be used"):
        obtain(SELFCHECK, ARCHS)


def test_an_explicit_folder_that_can_only_be_read_serves_what_it_has(
    monkeypatch: pytest.MonkeyPatch, nvcc: FakeNvcc
) -> None:
    """An administrator's cache: libraries are used, and a new one is refused instead of put elsewhere."""
    warmed = obtain(SELFCHECK, ARCHS)
    monkeypatch.setattr(os, "access", lambda *names, **more: False)
    monkeypatch.setattr(toolchain, "_is_program", lambda path: True)
    assert obtain(SELFCHECK, ARCHS) == warmed
    with pytest.raises(JitCacheError, match=r"COMM_CACHE_DIR=.* can't take a new library: .*not writable by user"):
        obtain(module(0), ARCHS)


def test_the_temporary_folder_is_refused_if_somebody_else_made_it(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name can be guessed, and everybody can make it first."""
    _no_home(homeless, monkeypatch)
    path = homeless / f"tmp/comm-{os.geteuid()}"
    target = homeless / "elsewhere"
    target.mkdir(0o700)
    path.symlink_to(target)
    with pytest.raises(JitCacheError, match=r"not a folder of user \d+ alone.*COMM_CACHE_DIR"):
        places.roots()
    path.unlink()
    path.mkdir()
    path.chmod(0o770)
    with pytest.raises(JitCacheError, match="Remove it"):
        places.roots()
    path.chmod(0o700)
    assert places.roots()[-1].path == path


# -- Whom to trust ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o722, 0o702, 0o720])
@pytest.mark.parametrize("depth", range(5))
def test_nothing_is_loaded_from_what_another_user_can_write(nvcc: FakeNvcc, mode: int, depth: int) -> None:
    """From the library up to the cache's folder, each step is looked at; the text has the command to mend it."""
    artifact = obtain(SELFCHECK, ARCHS)
    step = [artifact.path, *artifact.path.parents][depth]
    assert place().root.path in (step, *step.parents)
    step.chmod(mode)
    with pytest.raises(JitCacheError, match=rf"other users can write {step} \(mode {mode:04o}\).*chmod -R go-w"):
        obtain(SELFCHECK, ARCHS)
    subprocess.run(["chmod", "-R", "go-w", str(place().root.path)], check=True, timeout=DEADLINE)
    assert obtain(SELFCHECK, ARCHS) == artifact


def test_a_manifest_that_another_user_can_write_is_not_believed(nvcc: FakeNvcc) -> None:
    artifact = obtain(SELFCHECK, ARCHS)
    (artifact.folder / "manifest.json").chmod(0o666)
    with pytest.raises(JitCacheError, match=r"other users can write .*manifest\.json"):
        obtain(SELFCHECK, ARCHS)


@pytest.mark.parametrize("what", ["library", "entry"])
def test_a_symbolic_link_in_the_cache_is_not_followed(nvcc: FakeNvcc, what: str, tmp_path: Path) -> None:
    artifact = obtain(SELFCHECK, ARCHS)
    path = artifact.path if what == "library" else artifact.folder
    target = tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    with pytest.raises(JitCacheError, match=f"{path} is a symbolic link"):
        obtain(SELFCHECK, ARCHS)


def test_a_cache_folder_that_is_a_link_of_its_owner_is_fine(
    nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~/.cache on another disk."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("COMM_CACHE_DIR", str(tmp_path / "link/comm"))
    assert obtain(SELFCHECK, ARCHS).path.is_relative_to(tmp_path / "disk/comm")


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Let a file belong to somebody else: for root in truth, for others by looking at it that way."""
    if os.geteuid() == 0:
        yield lambda path: os.chown(path, 12345, 12345)
        return
    theirs: set[Path] = set()
    lstat = Path.lstat

    def other(path: Path) -> os.stat_result:
        found = lstat(path)
        return os.stat_result((*found[:4], 12345, *found[5:])) if path in theirs else found

    monkeypatch.setattr(Path, "lstat", other)
    yield theirs.add


@pytest.mark.parametrize("depth", range(5))
def test_nothing_is_loaded_that_belongs_to_another_user(
    nvcc: FakeNvcc, depth: int, foreign: Callable[[Path], None]
) -> None:
    artifact = obtain(SELFCHECK, ARCHS)
    step = [artifact.path, *artifact.path.parents][depth]
    foreign(step)
    with pytest.raises(JitCacheError, match=f"{step} belongs to user 12345"):
        obtain(SELFCHECK, ARCHS)


def test_a_folder_above_the_cache_must_not_let_others_replace_it(
    nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: Callable[[Path], None]
) -> None:
    """Write access to the parent is enough to swap the whole cache; a sticky parent (/tmp) forbids that."""
    parent = tmp_path / "parent"
    parent.mkdir()
    monkeypatch.setenv("COMM_CACHE_DIR", str(parent / "cache"))
    parent.chmod(0o777)
    with pytest.raises(JitCacheError, match=rf"other users can write {parent} \(mode 0777\) and so replace"):
        obtain(SELFCHECK, ARCHS)
    parent.chmod(0o1777)
    warmed = obtain(SELFCHECK, ARCHS)
    parent.chmod(0o700)
    foreign(parent)
    with pytest.raises(JitCacheError, match=f"{parent} belongs to user 12345, who can replace"):
        obtain(SELFCHECK, ARCHS)
    assert nvcc.made() == [warmed.module]


def test_a_group_of_ones_own_may_write_above_the_cache(
    nvcc: FakeNvcc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many systems give each user a private group and umask 002: ~/.cache is then writable by that group."""
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o775)
    monkeypatch.setenv("COMM_CACHE_DIR", str(parent / "cache"))
    monkeypatch.setattr(places, "_own_group", lambda gid: True)
    obtain(SELFCHECK, ARCHS)
    monkeypatch.setattr(places, "_own_group", lambda gid: False)
    with pytest.raises(JitCacheError, match=r"\(mode 0775\)"):
        obtain(SELFCHECK, ARCHS)


def test_what_is_published_is_private_whatever_the_umask(nvcc: FakeNvcc) -> None:
    old = os.umask(0)
    try:
        artifact = obtain(SELFCHECK, ARCHS)
    finally:
        os.umask(old)
    for path in (artifact.folder, *artifact.folder.rglob("*"), *artifact.path.parents[1:4]):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    # What a reader needs, and nothing else: no objects, no ninja logs, no temporary files.
    assert {path.name for path in artifact.folder.iterdir()} == {
        "comm_core_selfcheck.so", "manifest.json", "build.log", "build.ninja", "exports.map", "comm_core", "include",
    }  # fmt: skip


# -- Leftovers ----------------------------------------------------------------------------------------------------


def test_folders_of_dead_builders_are_told_from_those_of_living_ones(nvcc: FakeNvcc) -> None:
    """Another host's, and another container's, may be alive: their numbers mean nothing here."""
    obtain(SELFCHECK, ARCHS)
    staging = place().base / "staging"
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = cache._namespace()
    dead, living, elsewhere, old = (
        staging / f"comm_core_m0-k.{owner}-0123abcd"
        for owner in (f"{here}-{ended.pid}", f"{here}-{os.getpid()}", f"0000-{ended.pid}", "0000-1")
    )
    for path in (dead, living, elsewhere, old):
        path.mkdir()
    os.utime(old, (0, 0))
    assert place().leftovers() == sorted([dead, old])


def test_the_manifest_says_what_the_library_was_made_from(nvcc: FakeNvcc) -> None:
    artifact = obtain(replace(SELFCHECK, flags=("-DX",)), ("8.0", "9.0a"))
    manifest = json.loads((artifact.folder / "manifest.json").read_text())
    assert manifest["inputs"]["archs"] == ["8.0", "9.0a"] and manifest["inputs"]["compile_flags"][-1] == "-DX"
    assert manifest["built"]["nvcc"] == str(nvcc.path) and manifest["built"]["bytes"] == artifact.path.stat().st_size
    copied = set(path.relative_to(artifact.folder).as_posix() for path in artifact.folder.rglob("*.*"))
    assert set(manifest["inputs"]["files"]) <= copied


def test_waiting_for_a_lock_ends_when_its_holder_has_published(nvcc: FakeNvcc) -> None:
    """A holder that was stopped right after publishing keeps the lock; nobody needs it any more."""
    published = obtain(SELFCHECK, ARCHS)
    hidden = published.folder.with_name("hidden")
    published.folder.rename(hidden)
    (lock,) = (place().base / "locks").iterdir()
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        timer = threading.Timer(0.3, hidden.rename, (published.folder,))
        timer.start()
        assert obtain(SELFCHECK, ARCHS, timeout_s=20) == published
        timer.join()
    assert len(nvcc.made()) == 1


def test_the_first_error_is_found_in_what_compilers_print() -> None:
    """L7: recorded from nvcc 13.0, g++ 12 and ninja 1.11 and 1.13."""
    command = "/usr/local/bin/nvcc -Werror all-warnings -c a.cu -o a.o"
    log = f"""[1/3] {command.replace("a.", "b.")}
ptxas info    : 0 bytes gmem
[2/3] {command}
FAILED: [code=2] obj/0-a.o
{command}
a.cu(3): warning #177-D: variable "x" was declared but never referenced

a.cu(5): error: identifier "y" is undefined
      y = 1;
      ^
1 error detected in the compilation of "a.cu".
ninja: build stopped: subcommand failed.
"""
    assert build.first_error(log) == 'a.cu(5): error: identifier "y" is undefined'
    link = "FAILED: x.so\nnvcc\n/usr/bin/ld: a.o: in function `f':\na.cu:(.text+0x1): undefined reference to `g'\n"
    assert build.first_error(link) == "a.cu:(.text+0x1): undefined reference to `g'"
    header = "FAILED: a.o\nnvcc\na.cu:1:10: fatal error: no.h: No such file or directory\ncompilation terminated.\n"
    assert build.first_error(header) == "a.cu:1:10: fatal error: no.h: No such file or directory"
    assert build.first_error("ninja: error: loading 'build.ninja'\n") == "ninja: error: loading 'build.ninja'"
    assert build.first_error("") == ""
