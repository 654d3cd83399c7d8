"""Discovery: every plugin is loaded by itself, and what became of it is kept.

pluggy's own loader stops at the first entry point that fails and skips duplicates silently, so the entry points are
walked here, one by one. Nothing but `KeyboardInterrupt` gets out: a broken plugin costs its own backends and nothing
else.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pluggy

from comm_core import _env, known
from comm_core.errors import PluginError
from comm_core.plugins.hookspecs import API_VERSION, ENTRY_POINT_GROUP, PROJECT, CommSpecs

if TYPE_CHECKING:
    from comm_core.allreduce.backend import AllReduceBackend
    from comm_core.jit.spec import ModuleSpec
    from comm_core.transport.interface import Transport

__all__ = ["PluginReport", "Registry", "added", "discover", "register", "registry", "report", "unregister"]


@dataclass(frozen=True)
class PluginReport:
    """What became of one plugin.

    Attributes:
        name: entry-point name.
        distribution: package that provides it (``""`` for one that was registered by code).
        version: of that package.
        api: the hook API that it asked for, as ``"1.0"``.
        state: ``"loaded"``, ``"broken"``, ``"blocked"``, ``"incompatible"`` or ``"duplicate"``.
        error: why it is not loaded, or None.
        warnings: what is odd about a loaded one, for example a hook name that nobody calls.
        transports: names that it provides.
        codecs: names that it provides.
        allreduce: names that it provides.
        modules: names of its CUDA modules.
        seconds: time that loading took.
    """

    name: str
    distribution: str = ""
    version: str = ""
    api: str = ""
    state: str = "loaded"
    error: str | None = None
    warnings: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    allreduce: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass
class Registry:
    """The plugins of this process and what they provide.

    Attributes:
        reports: one a plugin, built-in ones first.
        transports: name -> transport.
        codecs: name -> codec.
        allreduce: name -> all-reduce backend.
        modules: name -> CUDA module.
        commands: (name, typer application) of ``commctl`` subcommands.
    """

    reports: list[PluginReport] = field(default_factory=list[PluginReport])
    transports: dict[str, Transport] = field(default_factory=dict[str, "Transport"])
    codecs: dict[str, Any] = field(default_factory=dict[str, Any])
    allreduce: dict[str, AllReduceBackend] = field(default_factory=dict[str, "AllReduceBackend"])
    modules: dict[str, ModuleSpec] = field(default_factory=dict[str, "ModuleSpec"])
    commands: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    def why_missing(self, name: str) -> str:
        """Return why transport, codec or all-reduce backend `name` is not here, with what to do about it."""
        provider = known.provider(name)
        distribution = "" if provider is None or provider.built_in else provider.distribution
        for item in self.reports:
            names = (item.name, *item.transports, *item.codecs, *item.allreduce)
            if item.state != "loaded" and (name in names or item.distribution == distribution != ""):
                return f"plugin {item.name!r} ({item.distribution} {item.version}) is {item.state}: {item.error}"
        for item in self.reports:
            if item.distribution == distribution != "":
                return (
                    f"{distribution} {item.version} is installed and does not provide {name!r}; if a later release "
                    f"does: pip install --upgrade {distribution}"
                )
        if distribution:
            return f"{distribution} is not installed; {known.install_hint(name)}"
        found = ", ".join(sorted({*self.transports, *self.codecs, *self.allreduce}))
        return f"no plugin provides {name!r}; found: {found} (`commctl plugins` shows where from)"

    def transport(self, name: str) -> Transport:
        """Return transport `name`.

        Raises:
            PluginError: it is not here; the text has the stored cause.
        """
        if name not in self.transports:
            raise PluginError(self.why_missing(name))
        return self.transports[name]

    def allreduce_backend(self, name: str) -> AllReduceBackend:
        """Return all-reduce backend `name`.

        Raises:
            PluginError: it is not here; the text has the stored cause.
        """
        if name not in self.allreduce:
            raise PluginError(self.why_missing(name))
        return self.allreduce[name]


@dataclass
class _Found:
    """A plugin object or the entry point that leads to one."""

    name: str
    load: Any
    distribution: str = ""
    version: str = ""
    built_in: bool = False


# Ranks compare what they provide by version and wire number; a module is compared by what it is built from.
_COMPARED: tuple[tuple[str, type], ...] = (("name", str), ("version", str), ("wire", int))
_MODULE: tuple[tuple[str, type], ...] = (("name", str), ("package", str), ("sources", tuple))

_HOOKS: tuple[tuple[str, str, tuple[tuple[str, type], ...]], ...] = (
    ("comm_transports", "transports", _COMPARED),
    ("comm_codecs", "codecs", _COMPARED),
    ("comm_allreduce", "allreduce", _COMPARED),
    ("comm_modules", "modules", _MODULE),
)


def discover(found: Iterable[_Found], blocked: frozenset[str] = frozenset()) -> Registry:
    """Load `found` one by one and return what they provide.

    Two plugins with one name are both refused, unless one of them is built in, which then stays, or blocked.
    """
    items = list(found)
    result = Registry()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(CommSpecs)
    if _env.trace_hooks():
        manager.trace.root.setwriter(lambda text: sys.stderr.write(text))
        manager.enable_tracing()
    for item in sorted(items, key=lambda item: (not item.built_in, item.name, item.distribution)):
        result.reports.append(_load_one(item, items, result, manager, blocked))
    return result


def _load_one(
    item: _Found, items: Sequence[_Found], result: Registry, manager: pluggy.PluginManager, blocked: frozenset[str]
) -> PluginReport:
    base = PluginReport(item.name, item.distribution, item.version)
    if _is_blocked(item, blocked):
        return replace(base, state="blocked", error="blocked by COMM_BLOCK_PLUGINS")
    twins = [o for o in items if o.name == item.name and o is not item and not _is_blocked(o, blocked)]
    if twins and not item.built_in:
        others = ", ".join(f"{other.distribution or 'code'} {other.version}".strip() for other in twins)
        return replace(base, state="duplicate", error=f"the name {item.name!r} is also provided by {others}")
    started = time.perf_counter()
    environment = dict(os.environ)
    try:
        # A plugin that prints while it is imported must not get into `commctl … --json`.
        with contextlib.redirect_stdout(sys.stderr):
            loaded = _load(item, base, result, manager)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # What a half-loaded plugin did to the environment must not change what the others do.
        os.environ.clear()
        os.environ.update(environment)
        state = "incompatible" if isinstance(error, _Incompatible) else "broken"
        state = "duplicate" if isinstance(error, _Duplicate) else state
        text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        loaded = replace(base, state=state, error=text)
    return replace(loaded, seconds=round(time.perf_counter() - started, 4))


def _is_blocked(item: _Found, blocked: frozenset[str]) -> bool:
    return not item.built_in and (item.name in blocked or ("*" in blocked and item.distribution != ""))


class _Incompatible(PluginError):
    """The plugin asks for another hook API."""


class _Duplicate(PluginError):
    """The plugin provides a name that is taken."""


def _load(item: _Found, base: PluginReport, result: Registry, manager: pluggy.PluginManager) -> PluginReport:
    plugin = item.load()
    if isinstance(plugin, type):
        plugin = plugin()
    api = _api(plugin)
    # A manager of its own first: what pluggy refuses, and hook names that nobody calls, belong to this plugin alone.
    trial = pluggy.PluginManager(PROJECT)
    trial.add_hookspecs(CommSpecs)
    trial.register(plugin, item.name)
    warnings: tuple[str, ...] = ()
    try:
        trial.check_pending()
    except pluggy.PluginValidationError as error:
        warnings = (f"a hook that comm-core {API_VERSION[0]}.{API_VERSION[1]} does not call: {error}",)
    manager.register(plugin, item.name)
    provided: dict[str, dict[str, Any]] = {}
    try:
        others = [other for other in manager.get_plugins() if other is not plugin]
        for hook, kind, attributes in _HOOKS:
            caller = manager.subset_hook_caller(hook, others)
            entries = [entry for part in cast("list[Sequence[Any]]", caller()) for entry in part]
            provided[kind] = _by_name(hook, attributes, entries, getattr(result, kind))
        commands = [entry for part in manager.subset_hook_caller("comm_commands", others)() for entry in part]
    except BaseException:
        manager.unregister(plugin)
        raise
    for kind, entries in provided.items():
        getattr(result, kind).update(entries)
    result.commands.extend(commands)
    return replace(
        base,
        api=f"{api[0]}.{api[1]}",
        warnings=warnings,
        transports=tuple(provided["transports"]),
        codecs=tuple(provided["codecs"]),
        allreduce=tuple(provided["allreduce"]),
        modules=tuple(provided["modules"]),
    )


def _api(plugin: object) -> tuple[int, int]:
    api = getattr(plugin, "comm_api", (API_VERSION[0], 0))
    try:
        major, minor = (int(part) for part in api)
    except (TypeError, ValueError):
        raise _Incompatible(f"comm_api must be (major, minor), got {api!r}") from None
    if major != API_VERSION[0] or minor > API_VERSION[1]:
        have = f"{API_VERSION[0]}.{API_VERSION[1]}"
        fix = "upgrade comm-core" if (major, minor) > API_VERSION else "upgrade the plugin"
        raise _Incompatible(f"it needs hook API {major}.{minor}, this comm-core has {have}: {fix}")
    return major, minor


def _by_name(
    hook: str, attributes: Sequence[tuple[str, type]], entries: Sequence[Any], taken: dict[str, Any]
) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for entry in entries:
        for attribute, kind in attributes:
            value = getattr(entry, attribute, None)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise PluginError(f"{hook}: {entry!r} must have {attribute!r} of type {kind.__name__}, got {value!r}")
        if entry.name in taken or entry.name in named:
            raise _Duplicate(f"{hook}: the name {entry.name!r} is already provided by another plugin")
        named[entry.name] = entry
    return named


def _built_in() -> list[_Found]:
    from comm_core._version import __version__
    from comm_core.transport import builtin

    return [_Found("dist", lambda: builtin, "comm-core", __version__, built_in=True)]


def _entry_points() -> list[_Found]:
    found: dict[tuple[str, str, str], _Found] = {}
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        distribution = "" if point.dist is None else point.dist.name
        version = "" if point.dist is None else point.dist.version
        # The same distribution can be on the path twice (an old egg-info beside a dist-info): that is one plugin.
        found.setdefault(
            (point.name, distribution, point.value), _Found(point.name, point.load, distribution, version)
        )
    return list(found.values())


class _State:
    """The registry of this process and what it was made from."""

    lock = threading.RLock()
    current: Registry | None = None
    blocked: frozenset[str] = frozenset()
    registered: ClassVar[list[_Found]] = []


def registry() -> Registry:
    """Return the plugins of this process, discovered at the first call and when ``COMM_BLOCK_PLUGINS`` changes."""
    with _State.lock:
        blocked = _env.blocked_plugins()
        if _State.current is None or _State.blocked != blocked:
            _State.current = discover([*_built_in(), *_entry_points(), *_State.registered], blocked)
            _State.blocked = blocked
        return _State.current


def added() -> Registry:
    """Return the plugins of this process without the built-in ones, which import torch; discovered at every call."""
    with _State.lock:
        return discover([*_entry_points(), *_State.registered], _env.blocked_plugins())


def report() -> list[PluginReport]:
    """Return what became of every plugin."""
    return list(registry().reports)


def register(name: str, plugin: object) -> PluginReport:
    """Add a plugin object that is not installed as an entry point, and return what became of it.

    `COMM_BLOCK_PLUGINS` blocks it by name (``*`` blocks only installed ones).
    """
    with _State.lock:
        _State.registered.append(_Found(name, lambda: plugin))
        _State.current = None
        # Not the report of an installed plugin of that name, which may be blocked.
        return next(item for item in report() if item.name == name and not item.distribution)


def unregister(name: str) -> None:
    """Remove what `register` added under `name`."""
    with _State.lock:
        _State.registered[:] = [item for item in _State.registered if item.name != name]
        _State.current = None
