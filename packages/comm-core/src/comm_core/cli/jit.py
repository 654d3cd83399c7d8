"""``commctl jit``: what is built, build ahead, why something would be built, clean up.

The object `app` is mounted as a command of ``commctl``; importing this stays cheap, the work is imported by what
needs it.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from comm_core._json import Json, JsonObject
    from comm_core.jit.cache import Artifact, Cache
    from comm_core.jit.spec import ModuleSpec

__all__ = ["app"]

app = typer.Typer(
    name="jit",
    help="The compiled CUDA modules: list them, build them ahead, explain builds, clean up.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_Archs = Annotated[
    list[str] | None,
    typer.Option(
        "--arch",
        metavar="LIST",
        help="GPU architectures, as in '9.0a' or '8.0;9.0a'. [COMM_CUDA_ARCH_LIST, else this machine's GPUs]",
    ),
]


@app.command("list")
def list_(json: _Json = False) -> None:
    """List the libraries in the cache, and the modules that are not built."""
    from comm_core.jit import specs

    caches = _caches(make=False)
    modules = specs()
    rows: list[JsonObject] = [_row(artifact, modules) for cache in caches for artifact in cache.artifacts()]
    built = {str(row["module"]) for row in rows if row["state"] == "current"}
    for name in modules:
        if name not in built:
            rows.append(
                {"module": name, "key": None, "archs": [], "bytes": 0, "state": "not built", "why": [], "path": None}
            )
    rows.sort(key=lambda row: (str(row["module"]), str(row["state"])))
    document: JsonObject = {"caches": [_place(cache) for cache in caches], "compiler": _compiler(), "modules": rows}
    if json:
        _emit(document)
        return
    for cache in caches:
        note = f" ({cache.root.note})" if cache.root.note else ""
        print(f"cache: {cache.root.path}{note}")
    print(f"compiler: {_compiler_text(document['compiler'])}\n")
    _table(
        ("module", "key", "archs", "size", "state"),
        (
            (
                str(row["module"]),
                str(row["key"] or "-"),
                ",".join(_texts(row["archs"])) or "-",
                _size(row["bytes"]),
                ": ".join(filter(None, (str(row["state"]), "; ".join(_texts(row["why"]))))),
            )
            for row in rows
        ),
    )


@app.command()
def warm(
    modules: Annotated[list[str] | None, typer.Argument(metavar="[MODULE]...", help="[all]")] = None,
    arch: _Archs = None,
    json: _Json = False,
) -> None:
    """Build modules ahead of time; needs no GPU. Exits with 1 if one can't be built.

    Of all modules, one that needs headers which this machine lacks is left out and named; alone, it fails.

    Several architectures end up in one library. COMM_JIT=off does not apply here: it sends people to this command.
    """
    from comm_core.errors import CommError, JitBuildError
    from comm_core.jit import obtain

    chosen = _select(modules)
    archs = _wanted_archs(arch)
    rows: list[JsonObject] = []
    for number, spec in enumerate(chosen):
        print(f"[{number + 1}/{len(chosen)}] {spec.name} for {';'.join(archs)}", file=sys.stderr, flush=True)
        key = path = error = None
        built, left_out = archs, False
        try:
            artifact = obtain(spec, archs, may_build=True)
            key, path, built = artifact.key, str(artifact.path), artifact.archs
        except CommError as caught:
            error = str(caught)
            # Other modules are what most users want; a transport that needs this one says the same when it is opened.
            left_out = not modules and isinstance(caught, JitBuildError) and bool(caught.lacking)
        rows.append(
            {
                "module": spec.name,
                "archs": list(built),
                "key": key,
                "path": path,
                "error": error,
                "left_out": left_out,
            }
        )
    failed = [row for row in rows if row["error"] and not row["left_out"]]
    for row in rows:
        if row["error"]:
            print(f"commctl: {row['error']}", file=sys.stderr)
    if json:
        _emit({"modules": rows})
    else:
        for row in rows:
            print(f"{row['module']}: {row['path'] or ('left out' if row['left_out'] else 'failed')}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def explain(
    module: Annotated[str, typer.Argument(metavar="MODULE")],
    arch: _Archs = None,
    json: _Json = False,
) -> None:
    """Say whether a module is built for here and now, and if not, what has changed since it last was."""
    from comm_core.jit import key, libraries

    (spec,) = _select([module])
    archs = _wanted_archs(arch)
    caches = _caches(make=False)
    want = libraries.wanted(spec, archs)
    found = libraries.lookup(want, caches)
    newest = max((item for cache in caches for item in cache.artifacts(module)), key=_built_at, default=None)
    changes = [] if found is not None or newest is None else key.explain(newest.inputs, want.inputs)
    document: JsonObject = {
        "module": module,
        "archs": list(archs),
        "key": want.key,
        "path": None if found is None else str(found.path),
        "newest": None if newest is None else newest.key,
        "changes": changes,
        "compiler_problem": None if want.problem is None else str(want.problem),
        "inputs": want.inputs,
    }
    if json:
        _emit(document)
        return
    print(f"{module} for {';'.join(archs)}: key {want.key or 'unknown, since there is no compiler'}")
    if want.problem is not None:
        print(f"no compiler: {want.problem}")
    if found is not None:
        print(f"built: {found.path}")
    elif newest is None:
        print("not built, and no other build of it is in the cache")
    else:
        print(f"not built; compared with the newest build, {newest.key}:")
        for change in changes:
            print(f"  - {change}")


@app.command()
def clean(
    all_: Annotated[bool, typer.Option("--all", help="Remove every library, not just those without use.")] = False,
    json: _Json = False,
) -> None:
    """Remove libraries that the installed packages would not load any more, and what killed builds left."""
    import shutil

    from comm_core.jit import specs

    removed: list[JsonObject] = []
    modules = specs()
    for cache in _caches(make=False):
        for folder in cache.leftovers():
            removed.append({"path": str(folder), "bytes": _folder_size(folder), "why": "unfinished or broken"})
            shutil.rmtree(folder, ignore_errors=True)
        for artifact in cache.artifacts():
            row = _row(artifact, modules)
            if all_ or row["state"] != "current":
                why = "--all" if all_ else str(row["state"])
                removed.append({"path": str(artifact.folder), "bytes": _folder_size(artifact.folder), "why": why})
                cache.remove(artifact)
    if json:
        _emit({"removed": removed})
        return
    for row in removed:
        print(f"removed {row['path']} ({row['why']})")
    total = sum(int(size) for row in removed if isinstance(size := row["bytes"], int))
    print(f"{len(removed)} folders, {_size(total)}")


# -- What the commands share --------------------------------------------------------------------------------------


def _caches(*, make: bool) -> list[Cache]:
    from comm_core.jit.cache import Cache
    from comm_core.jit.places import roots

    return [Cache(root) for root in roots(make=make)]


def _place(cache: Cache) -> JsonObject:
    root = cache.root
    return {"path": str(root.path), "explicit": root.explicit, "writable": root.writable, "note": root.note}


def _compiler() -> JsonObject:
    from comm_core.errors import JitBuildError
    from comm_core.jit import toolchain

    try:
        found = toolchain.find()
        ninja = toolchain.find_ninja()
    except JitBuildError as error:
        return {"problem": str(error)}
    return {
        "nvcc": found.nvcc,
        "source": found.source,
        "version": found.version,
        "toolkit": found.root,
        "host_compiler": found.host_compiler,
        "host_version": found.host_version,
        "ninja": ninja,
        "problem": None,
    }


def _compiler_text(value: Json) -> str:
    assert isinstance(value, dict)
    if value["problem"]:
        return str(value["problem"])
    return f"nvcc {value['version']} at {value['nvcc']} (by {value['source']}), {value['host_version']}"


def _select(names: Sequence[str] | None) -> list[ModuleSpec]:
    """Return the modules called `names`, or all."""
    from comm_core.errors import ArgumentValueError
    from comm_core.jit import specs
    from comm_core.plugins import report

    modules = specs()
    lost = [item for item in report() if item.state not in ("loaded", "blocked")]
    unknown = [name for name in names or () if name not in modules]
    if unknown:
        causes = "".join(f"; plugin {item.name!r} is {item.state}: {item.error}" for item in lost)
        raise ArgumentValueError(
            f"no module {', '.join(map(repr, unknown))}; there are: {', '.join(modules)}{causes}"
        )
    if not names:
        for item in lost:
            print(f"commctl: modules of plugin {item.name!r} are missing: {item.error}", file=sys.stderr)
    return [modules[name] for name in dict.fromkeys(names or modules)]


def _wanted_archs(given: Sequence[str] | None) -> tuple[str, ...]:
    from comm_core.jit import archs

    if given:
        return archs.parse_list(";".join(given), "--arch")
    return archs.choose_for_machine()


def _row(artifact: Artifact, modules: dict[str, ModuleSpec]) -> JsonObject:
    """Return a library as JSON, with whether the installed packages would load it."""
    from comm_core.jit import key, libraries

    spec = modules.get(artifact.module)
    state, why = "current", list[str]()
    if spec is None:
        state = "unknown module"
    else:
        want = libraries.wanted(spec, artifact.archs)
        same = key.same_code(artifact.inputs, want.inputs)
        if not same or (want.key is not None and want.key != artifact.key):
            state, why = "stale", key.explain(artifact.inputs, want.inputs)
    return {
        "module": artifact.module,
        "key": artifact.key,
        "archs": list(artifact.archs),
        "bytes": artifact.path.stat().st_size,
        "state": state,
        "why": why,
        "path": str(artifact.path),
        "built": artifact.built,
    }


def _built_at(artifact: Artifact) -> float:
    value = artifact.built.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


def _folder_size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _texts(value: Json) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def _size(value: Json) -> str:
    if not isinstance(value, int) or not value:
        return "-" if value is None else "0"
    return f"{value / 1024**2:.1f} MiB" if value >= 1024**2 else f"{value / 1024:.0f} KiB"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [headers, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _emit(value: Json) -> None:
    sys.stdout.write(json_module.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()
