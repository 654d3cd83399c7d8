"""What the CUDA modules of every package must be, as tests. A package subclasses and runs them under pytest::

    class TestModules(CudaModulesContract):
        package = comm_nvlink
        modules = (ULYSSES, POOL)

Needs nvcc, but no GPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import comm_core
from comm_core import jit
from comm_core.jit.cache import Artifact
from comm_core.jit.spec import ModuleSpec
from comm_core.testing import cubin

__all__ = ["CudaModulesContract"]

_SECONDS = 60
_FIRST_BUILD_ARCH = "9.0a"


class CudaModulesContract:
    """Every module of a package, compiled for every architecture; and its headers, alone.

    Attributes:
        package: the package.
        modules: its modules that have kernels or host code of their own, `elsewhere` left out.
        elsewhere: modules that other tests compile.
        describing: a statement that imports the descriptions, which must import nothing heavy.
        first_build_s: processor time that building all of them for one architecture may take.
        may_spill: parts of names of kernels that may; the reason belongs beside it.
    """

    package: ClassVar[ModuleType]
    modules: ClassVar[tuple[ModuleSpec, ...]]
    elsewhere: ClassVar[tuple[ModuleSpec, ...]] = ()
    describing: ClassVar[str]
    first_build_s: ClassVar[float] = 10.0
    may_spill: ClassVar[tuple[str, ...]] = ()

    _built: ClassVar[dict[str, Artifact]]

    def __init_subclass__(cls, **_: Any) -> None:
        """Give each package's tests a store of their own for what they have built."""
        cls._built = {}

    @property
    def folder(self) -> Path:
        """Where the package lies."""
        return Path(str(self.package.__file__)).parent

    def built(self, spec: ModuleSpec, tmp_path_factory: Any) -> Artifact:
        """Return a module for every architecture, built once."""
        if spec.name not in self._built:
            self._built[spec.name] = cubin.build(spec, tmp_path_factory.mktemp("cache of the tests"))
        return self._built[spec.name]

    def test_every_module_is_compiled_here_and_can_be_built_ahead(self) -> None:
        """A module that nobody lists is not built by ``commctl jit warm``, and not tested by anybody."""
        name = self.package.__name__
        known = [*jit.specs().values(), *self.modules, *self.elsewhere]
        own = {spec.name: spec for spec in known if spec.package == name}
        assert own == {spec.name: spec for spec in (*self.elsewhere, *self.modules)}
        sources = {str(path.relative_to(self.folder)) for path in (self.folder / "csrc").iterdir()}
        assert sources == {source for spec in own.values() for source in spec.sources}

    def test_each_is_as_every_module_must_be(self, tmp_path_factory: Any) -> None:
        """Five architectures, no spills, sizes as in Python, only entry points exported, no torch, Python or CUDA."""
        for spec in self.modules:
            library = self.built(spec, tmp_path_factory)
            assert library.archs == cubin.ARCHS
            assert cubin.problems(spec, library, may_spill=self.may_spill) == []
            usage = cubin.kernel_usage(library.log.read_text(encoding="utf-8"))
            kernels = [item for item in usage if item.kernel]
            names = {item.name for item in kernels}
            # The check can't pass by reading nothing.
            assert bool(names) == any(source.endswith(".cu") for source in spec.sources)
            assert len(kernels) == len(cubin.ARCHS) * len(names)
            assert all(item.registers > 0 for item in kernels)

    def test_the_first_build_is_short(self, tmp_path_factory: Any) -> None:
        """All modules for one architecture, one after the other: what the first call on a machine waits for.

        In processor time, as the build's own children have used it: a machine that does other work as well makes no
        build slower.
        """
        import resource

        cubin.require_nvcc()
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        for spec in self.modules:
            cubin.build(spec, tmp_path_factory.mktemp("first build"), [_FIRST_BUILD_ARCH])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        names = ", ".join(spec.name for spec in self.modules)
        print(f"first build of {names}: {time.monotonic() - started:.1f} s, {processor:.1f} s of a processor")
        assert processor <= self.first_build_s

    def test_the_headers_stand_alone_on_a_host(self, tmp_path: Path) -> None:
        """Each header includes what it needs and compiles with a plain host compiler, for ThreadSanitizer."""
        core = Path(comm_core.__file__).parent
        headers = sorted((self.folder / "include" / self.package.__name__).iterdir())
        assert headers
        for header in headers:
            source = tmp_path / "alone.cpp"
            name = f"{self.package.__name__}/{header.name}"
            source.write_text(f"#include <{name}>\nint main() {{ return 0; }}\n", encoding="utf-8")
            command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
            includes = [f"-I{core / 'include'}", f"-I{self.folder / 'include'}"]
            done = subprocess.run(
                [*command, *includes, str(source)], capture_output=True, text=True, timeout=_SECONDS
            )
            assert done.returncode == 0, f"{header.name}: {done.stderr}"

    def test_describing_the_modules_needs_neither_torch_nor_cuda(self) -> None:
        """``commctl jit list`` reads descriptions: reading them imports nothing heavy."""
        code = f"import sys; {self.describing}; print(sorted({{'torch', 'pynvml', 'cuda'}} & set(sys.modules)))"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=_SECONDS
        )
        assert (done.stdout.strip(), done.stderr) == ("[]", "")
