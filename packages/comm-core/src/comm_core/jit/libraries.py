"""From a module's description to its library: in the cache, or built there, once for all processes."""

from __future__ import annotations

import logging
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from comm_core import _cuda, _env
from comm_core._json import JsonObject
from comm_core._version import __version__
from comm_core.errors import JitBuildError, JitMissingError
from comm_core.jit import archs as arch_names
from comm_core.jit import build, places, toolchain
from comm_core.jit import key as keys
from comm_core.jit.cache import Artifact, Cache
from comm_core.jit.spec import ModuleSpec

__all__ = ["Wanted", "lookup", "obtain", "wanted", "warm_command"]

_log = logging.getLogger("comm_core")


@dataclass(frozen=True)
class Wanted:
    """What a module would be built from, here and now.

    Attributes:
        spec: the module.
        files: its files.
        archs: normalized.
        inputs: of the build; without a toolchain, those parts are None.
        key: of the inputs; None without a toolchain.
        toolchain: what compiles, or None.
        problem: why there is no toolchain.
    """

    spec: ModuleSpec
    files: keys.Snapshot
    archs: tuple[str, ...]
    inputs: JsonObject
    key: str | None
    toolchain: toolchain.Toolchain | None
    problem: JitBuildError | None


def wanted(spec: ModuleSpec, archs: Sequence[str], *, compiler: bool = True) -> Wanted:
    """Return what `spec` would be built from.

    Args:
        spec: the module.
        archs: as `comm_core.jit.archs` writes them.
        compiler: look for one; False where nothing will be built anyway.
    """
    chosen = arch_names.normalize(archs)
    files = keys.snapshot(spec)
    found: toolchain.Toolchain | None = None
    problem: JitBuildError | None = None
    if compiler:
        try:
            found = toolchain.find()
        except JitBuildError as error:
            # No reason to give up: what is in the cache needs no compiler.
            problem = error
    inputs = keys.inputs(
        spec,
        files,
        chosen,
        machine=platform.machine(),
        nvcc=found and found.version_text,
        host_compiler=found and found.host_version,
        libc=toolchain.libc_version() if found else None,
        environment=dict(found.environment) if found else {},
    )
    return Wanted(spec, files, chosen, inputs, keys.key(inputs) if found else None, found, problem)


def lookup(want: Wanted, caches: Sequence[Cache], capability: str | None = None) -> Artifact | None:
    """Return the library in the cache that does for `want`, or None.

    With a compiler at hand that is one that this compiler made. Without one it is any that was made from these
    sources, since a library shares nothing but the C interface with the process. More architectures do no harm.

    Args:
        want: what is wanted.
        caches: where to look, in order.
        capability: of the device, where there is one.
    """
    name = want.spec.name
    if want.key is not None:
        for place in caches:
            found = place.find(name, want.key)
            if found is not None:
                return found
    for place in caches:
        for artifact in place.artifacts(name):
            if not keys.same_code(artifact.inputs, want.inputs):
                continue
            if want.key is not None and keys.differences(artifact.inputs, want.inputs, ("archs",)):
                continue
            if set(want.archs) <= set(artifact.archs):
                return artifact
            if want.key is None and capability and arch_names.runs_on(artifact.archs, capability):
                return artifact
    return None


def obtain(
    spec: ModuleSpec,
    archs: Sequence[str],
    *,
    capability: str | None = None,
    may_build: bool | None = None,
    timeout_s: float | None = None,
) -> Artifact:
    """Return the library of `spec` for `archs`; builds it if it is not in the cache.

    Any number of processes may ask for the same or for different modules at once: one builds, the others wait for it.

    Args:
        spec: the module.
        archs: as `comm_core.jit.archs` writes them.
        capability: of the device that it is for, where there is one.
        may_build: None is what ``COMM_JIT`` says.
        timeout_s: seconds for waiting and building together; None is ``COMM_JIT_TIMEOUT_S``.

    Raises:
        JitMissingError: it must not be built now: ``COMM_JIT=off``, or a stream is being captured.
        JitBuildError: it can't be built.
        JitCacheError: the cache can't be used.
    """
    allowed = not _env.jit_off() if may_build is None else may_build
    want = wanted(spec, archs, compiler=allowed)
    caches = [Cache(root) for root in places.roots(make=allowed)]
    found = lookup(want, caches, capability)
    if found is not None:
        return found
    if not allowed:
        looked = ", ".join(str(place.root.path) for place in caches) or "no cache"
        raise JitMissingError(
            f"module {spec.name!r} is not built for {arch_names.join(want.archs)} (looked in {looked}), and "
            f"COMM_JIT=off forbids compiling. Build it with: {warm_command(spec, want.archs)}"
        )
    if want.toolchain is None or want.key is None:
        raise want.problem or JitBuildError(f"module {spec.name!r}: there is no compiler")
    if "torch" in sys.modules and _cuda.is_capturing():
        # Minutes of compiling in the middle of a capture, and then a module load, which a capture does not allow.
        raise JitMissingError(
            f"module {spec.name!r} is not built for {arch_names.join(want.archs)}, and the current stream is being "
            f"captured into a CUDA graph. Make the call once before capturing, or run: "
            f"{warm_command(spec, want.archs)}"
        )
    seconds = _env.jit_timeout_s() if timeout_s is None else timeout_s
    return _build(want, want.key, want.toolchain, caches[-1], time.monotonic() + seconds)


def _build(want: Wanted, key: str, tools: toolchain.Toolchain, place: Cache, deadline: float) -> Artifact:
    name = want.spec.name
    _require_headers(want.spec, tools)
    place.require_writable()
    ninja = toolchain.find_ninja()
    before = place.failure(name, key)
    with place.lock(name, key, deadline) as held:
        # Somebody else may have built it, or failed to, while this process waited.
        found = place.find(name, key)
        if found is not None:
            return found
        failed = place.failure(name, key)
        if failed is not None and (before is None or failed.stamp != before.stamp):
            raise JitBuildError(failed.text, command=failed.command, log=failed.log)
        if not held:
            raise JitBuildError(f"module {name!r}: its library was in the cache and is gone again; try once more")
        _log.info("building %s for %s with %s (%s)", name, arch_names.join(want.archs), tools.nvcc, tools.version)
        remark = toolchain.compare_cuda(tools.version, _cuda.runtime_version() if "torch" in sys.modules else None)
        if remark:
            _log.info("%s", remark)
        with place.staging(name, key) as folder:
            try:
                log = place.failure_log(name, key)
                seconds = build.compile_module(want.spec, want.files, want.archs, folder, tools, ninja, deadline, log)
            except JitBuildError as error:
                place.note_failure(name, key, error)
                raise
            place.forget_failure(name, key)
            built: JsonObject = {
                "time": round(time.time(), 3),
                "seconds": round(seconds, 3),
                "package": want.spec.package,
                "comm_core": __version__,
                "nvcc": tools.nvcc,
                "toolkit": tools.root,
                "host_compiler": tools.host_compiler,
            }
            artifact = place.publish(folder, name, key, want.inputs, built)
        _log.info("built %s in %.1f s: %s", name, seconds, artifact.folder)
        return artifact


def _require_headers(spec: ModuleSpec, tools: toolchain.Toolchain) -> None:
    if not spec.needs:
        return
    packages = dict(spec.needs)
    lacking = toolchain.missing_headers(tools.host_compiler, tuple(packages))
    if lacking:
        names = tuple(dict.fromkeys(packages[header] for header in lacking))
        raise JitBuildError(
            f"module {spec.name!r} is not built: {tools.host_compiler} finds no {', '.join(lacking)}. On Debian and "
            f"Ubuntu: apt-get install {' '.join(names)}",
            lacking=names,
        )


def warm_command(spec: ModuleSpec, archs: Sequence[str]) -> str:
    """Return the command that builds `spec` for `archs` into the cache that this process looks in."""
    explicit = _env.cache_dir()
    prefix = f"COMM_CACHE_DIR={shlex.quote(explicit)} " if explicit else ""
    return f"{prefix}commctl jit warm --arch {shlex.quote(arch_names.join(archs))} {spec.name}"
