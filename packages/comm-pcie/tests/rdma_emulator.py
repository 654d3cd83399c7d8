"""The verbs emulator for tests: built from ``verbs_emulator/``, and a fabric of NICs that any process can use.

    library = emulator.build(folder)
    with emulator.World(library, folder / "fabric", [emulator.Nic("mlx5_0", ("10.0.0.1",)), ...]) as world:
        os.environ.update(world.environment)      # for this process and those that it starts
        loaded = load_verbs(module=emulator.engine_module(folder))
        world.rule("drop verb=write_imm nic=mlx5_0 after=1")

A rule is ``ACTION verb=V [nic=N] [peer=N] [value=K] [after=K] [count=K]``: it fires for the calls that it selects,
after `after` of them, `count` times (0: always). Closing a world fails the test where a rule did not fire, or where
an object was left behind, unless the test says that it expects that.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import pytest

from comm_core.errors import JitBuildError
from comm_core.jit import Module, toolchain
from comm_core.jit.cache import Artifact
from comm_pcie.rdma.module import RDMA

SOURCES = Path(__file__).with_name("verbs_emulator")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")
_SECONDS = 240

ROCE_V2 = 2
ACTIVE, DOWN = 4, 1
ETHERNET, INFINIBAND = 2, 1
VERBS = (
    "write", "write_imm", "umr", "post_recv", "open", "alloc_pd", "reg_mr", "reg_dmabuf", "create_cq", "create_qp",
    "create_mkey", "modify_qp", "destroy_qp", "dereg_mr", "destroy_mkey", "destroy_cq", "dealloc_pd", "close", "poll",
)  # fmt: skip
"""In the order of ``fabric.h``."""
OTHERS = (
    "executed_writes", "written_bytes", "umrs", "completions", "errors", "flushed", "rnr_naks", "overflows", "events",
    "withheld", "not_ready_posts",
)  # fmt: skip
KINDS = ("contexts", "domains", "regions", "keys", "completion_queues", "queue_pairs")


def require_headers() -> None:
    """Skip the test without rdma-core's headers; in CI (``CI=true``) fail it, because there they must be."""
    problem = ""
    try:
        missing = toolchain.missing_headers("g++", ("infiniband/verbs.h", "infiniband/mlx5dv.h"))
        if missing:
            problem = f"no {', '.join(missing)}: apt-get install libibverbs-dev"
    except JitBuildError as error:
        problem = str(error)
    if problem and os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must run the tests of RDMA on the emulator: {problem}")
    if problem:
        pytest.skip(f"the verbs emulator can't be built: {problem}")


def _compile(output: Path, sources: Sequence[Path], includes: Sequence[str], flags: Sequence[str]) -> None:
    """Compile each source by itself, side by side, and link them."""
    # Warnings are errors where one compiler is used, in the tests of these sources: a newer one has newer warnings.
    warnings = [flag for flag in WARNINGS if flag != "-Werror"]
    common = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", "-pthread", *warnings, *includes, *flags]
    objects = [output.with_name(f"{output.stem}-{source.stem}.o") for source in sources]
    runs = [
        subprocess.Popen([*common, "-c", "-o", str(made), str(source)])
        for source, made in zip(sources, objects, strict=True)
    ]
    codes = [run.wait(_SECONDS) for run in runs]
    assert codes == [0] * len(runs), f"{output.name} can't be compiled"
    command = ["g++", "-shared", "-pthread", *flags, "-o", str(output), *map(str, objects), "-ldl"]
    subprocess.run(command, check=True, timeout=_SECONDS)


def session_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this test session where the emulator and the engine are built once for all test files."""
    folder = factory.getbasetemp() / "rdma"
    folder.mkdir(exist_ok=True)
    return folder


def build(folder: Path, *flags: str) -> Path:
    """Build the emulator in `folder` and return its path; skips the test where the headers are missing."""
    require_headers()
    library = folder / "libverbs_emulator.so"
    if not library.exists():
        # As one file: most of the time would go into the same headers again.
        whole = folder / "verbs_emulator.cpp"
        whole.write_text("".join(f'#include "{path}"\n' for path in sorted(SOURCES.glob("*.cpp"))), encoding="utf-8")
        _compile(library, [whole], [], ["-fvisibility=hidden", *flags])
    return library


def engine_module(folder: Path, *flags: str) -> Module:
    """Build the module of the engine with the host's compiler and return it loaded."""
    require_headers()
    library = folder / f"{RDMA.name}.so"
    if not library.exists():
        package = resources.files(RDMA.package)
        sources = [Path(str(package / source)) for source in RDMA.sources]
        includes = [f"-I{resources.files(name) / 'include'}" for name in RDMA.include_packages]
        _compile(library, sources, includes, flags)
    return Module(RDMA, Artifact(RDMA.name, "host", library, {"archs": []}, {}))


def gid(address: str) -> bytes:
    """Return the 16 bytes of an IPv4 address (mapped) or an IPv6 address."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv4Address):
        return bytes(10) + b"\xff\xff" + found.packed
    return found.packed


class Entry(NamedTuple):
    """An entry of a GID table."""

    index: int
    address: str
    type: int = ROCE_V2
    ifindex: int = 2


class Nic(NamedTuple):
    """An emulated NIC with one port; `addresses` are entries 0, 1… of its GID table, of RoCE v2, or `Entry`s."""

    name: str
    addresses: tuple[str | Entry, ...]
    mlx5: bool = True
    interleaved: bool = True
    dmabuf: bool = True
    state: int = ACTIVE
    link_layer: int = ETHERNET
    mtu: int = 5
    numa: int = 0
    max_message: int = 1 << 30

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its GID table."""
        return tuple(
            item if isinstance(item, Entry) else Entry(number, item) for number, item in enumerate(self.addresses)
        )


def nics(count: int, **changes: object) -> list[Nic]:
    """Return `count` NICs ``mlx5_0``…, NIC n with address 10.0.0.(n+1) at entry 0."""
    return [Nic(f"mlx5_{number}", (f"10.0.0.{number + 1}",), **changes) for number in range(count)]  # pyright: ignore


class World:
    """A fabric: a file that processes share. One at a time in a process.

    Args:
        library: of the emulator.
        path: of the file.
        devices: its NICs.
        copies: False moves no bytes, for measuring what the rest costs.
        shuffle: a seed by which completions of different queue pairs change places; 0: in the order of events.
    """

    def __init__(
        self, library: Path, path: Path, devices: Sequence[Nic], *, copies: bool = True, shuffle: int = 0
    ) -> None:
        self.path = path
        self.environment = {"VERBS_EMULATOR": str(path), "COMM_VERBS_LIBRARY": str(library)}
        self.expect_leaks = False
        self._library = bound(library)
        lines = [f"copies {int(copies)}", f"shuffle {shuffle}"]
        for nic in devices:
            flags = (nic.mlx5, nic.interleaved, nic.dmabuf, nic.state, nic.link_layer, nic.mtu, nic.numa)
            lines.append(f"nic {nic.name} {' '.join(str(int(flag)) for flag in flags)} {nic.max_message}")
            lines += [
                f"gid {nic.name} {entry.index} {entry.type} {entry.ifindex} {gid(entry.address).hex()}"
                for entry in nic.entries
            ]
        code = self._library.emu_create(os.fsencode(path), "\n".join(lines).encode())
        assert code == 0, f"the fabric can't be made: {code}"
        self._before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(check=kind is None)

    def rule(self, text: str) -> None:
        """Add a rule; one that can't fire is an error."""
        why = ctypes.create_string_buffer(256)
        assert self._library.emu_rule(text.encode(), why, len(why)) >= 0, f"{text}: {why.value.decode()}"

    def clear_rules(self) -> None:
        """Remove all rules."""
        self._library.emu_clear_rules()

    def unfired(self) -> str:
        """Return the rules that did not fire as often as they say, one a line."""
        text = ctypes.create_string_buffer(4096)
        self._library.emu_unfired(text, len(text))
        return text.value.decode()

    def counters(self) -> dict[str, int]:
        """Return what all processes did so far, by name of the verb and of the event."""
        values = (ctypes.c_uint64 * 64)()
        count = self._library.emu_counters(values, len(values))
        assert count == len(VERBS) + len(OTHERS)
        return dict(zip((*VERBS, *OTHERS), values, strict=False))

    def alive(self) -> dict[str, int]:
        """Return how many objects of each kind exist, in all processes."""
        values = (ctypes.c_int32 * len(KINDS))()
        self._library.emu_alive(values)
        return dict(zip(KINDS, values, strict=True))

    def problem(self) -> str:
        """Return why the emulator refused something last."""
        text = ctypes.create_string_buffer(512)
        self._library.emu_problem(text, len(text))
        return text.value.decode()

    def flush(self) -> int:
        """Let this process see what was withheld from it; return how many pieces that were."""
        return self._library.emu_flush()

    def withheld(self) -> int:
        """Return how many pieces are withheld from this process."""
        return self._library.emu_withheld()

    def release(self) -> None:
        """Hand out the completions that rules kept back in this process."""
        self._library.emu_release()

    def set_port(self, nic: str, state: int, mtu: int = 0) -> None:
        """Change a port and tell its users."""
        assert self._library.emu_set_port(nic.encode(), state, mtu) == 0

    def set_gid(self, nic: str, index: int, address: str | None, kind: int = ROCE_V2, ifindex: int = 2) -> None:
        """Change an entry of a GID table (None: empty it) and tell its users."""
        raw = None if address is None else gid(address)
        assert self._library.emu_set_gid(nic.encode(), index, raw, kind, ifindex) == 0

    def event(self, nic: str, kind: int, port: int = 1) -> None:
        """Send an event (enum ibv_event_type) to a NIC's users; one about a queue pair is about their first."""
        assert self._library.emu_event(nic.encode(), kind, port) > 0

    def reap(self) -> int:
        """Free what processes that ended left behind; return how many devices they had open."""
        return self._library.emu_reap()

    def close(self, *, check: bool = True) -> None:
        """Remove the fabric and check that every rule fired and nothing was left."""
        unfired, alive = self.unfired(), self.alive()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for path in (self.path, *self.path.parent.glob(f"{self.path.name}.events*")):
            path.unlink(missing_ok=True)
        if check:
            assert not unfired, f"rules that did not fire: {unfired}"
            assert self.expect_leaks or not any(alive.values()), f"left behind: {alive}"


def bound(library: Path) -> ctypes.CDLL:
    """Return the emulator's library with its functions for tests."""
    loaded = ctypes.CDLL(str(library))
    text, size, number = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint32
    for name, arguments in {
        "emu_create": (text, text),
        "emu_rule": (text, ctypes.c_void_p, size),
        "emu_flush": (),
        "emu_withheld": (),
        "emu_release": (),
        "emu_counters": (ctypes.c_void_p, ctypes.c_int),
        "emu_problem": (ctypes.c_void_p, size),
        "emu_alive": (ctypes.c_void_p,),
        "emu_unfired": (ctypes.c_void_p, size),
        "emu_clear_rules": (),
        "emu_reap": (),
        "emu_set_port": (text, number, number),
        "emu_set_gid": (text, number, text, number, number),
        "emu_event": (text, number, number),
    }.items():
        getattr(loaded, name).argtypes = list(arguments)
    return loaded
