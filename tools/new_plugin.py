#!/usr/bin/env python3
"""Write a new plugin package: a transport that works, with its tests, ready to be changed.

    python tools/dev.py new-plugin NAME [--into DIR]

NAME is what users will pass as `backend=`; the package is called `comm-NAME` and imported as `comm_NAME`. It runs
plans over torch.distributed, passes the contract suite as it is, and can be released by `tools/release.py`. In this
workspace the next `python tools/dev.py` command installs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "tools" / "templates" / "plugin"
CORE = ROOT / "packages" / "comm-core"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
RESERVED = {"auto", "core", "dist"}
"""Names that mean something else: a choice, a package, a built-in plugin."""


class PluginNameError(ValueError):
    """The name or the place can't be used; the text says why."""


def _load(name: str, path: Path) -> ModuleType:
    """Load one file of comm-core by its path: this tool runs before anything is installed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def check_name(name: str) -> None:
    """Check that a plugin may be called `name`.

    Raises:
        PluginNameError: it is not a name that pip and Python take, or it is taken.
    """
    if not NAME.fullmatch(name):
        raise PluginNameError(
            f"{name!r} can't be a plugin's name: it must be lower-case letters and digits, begin with a letter, and "
            "may have single '-' between them (as 'fastlink' or 'fast-link')"
        )
    if name in RESERVED:
        raise PluginNameError(f"{name!r} is reserved; reserved are {', '.join(sorted(RESERVED))}")
    known = _load("_comm_core_known", CORE / "src" / "comm_core" / "known.py")
    taken = {**known.TRANSPORTS, **known.CODECS}
    if name in taken:
        raise PluginNameError(f"{name!r} is a name of {taken[name].distribution} (comm_core/known.py)")
    distributions = {entry.distribution for entry in taken.values()}
    if f"comm-{name}" in distributions:
        raise PluginNameError(f"comm-{name} is a package of this project already (comm_core/known.py)")


def core_requirement(version: str) -> str:
    """Return what a plugin made with comm-core `version` asks for: that one up to the next that may break it."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, version
    major, minor = int(match[1]), int(match[2])
    cap = f"0.{minor + 1}" if major == 0 else str(major + 1)
    return f"comm-core>={version},<{cap}"


def write(name: str, into: Path) -> Path:
    """Write the package of plugin `name` into a new folder under `into` and return that folder.

    The folder appears complete or not at all.

    Raises:
        PluginNameError: the name can't be used, or the folder exists.
    """
    check_name(name)
    target = into / f"comm-{name}"
    if target.exists() or target.is_symlink():
        raise PluginNameError(f"{target} exists; it is left as it is")
    if not into.is_dir():
        raise PluginNameError(f"{into} is no folder")
    module = f"comm_{name.replace('-', '_')}"
    hooks = (CORE / "src" / "comm_core" / "plugins" / "hookspecs.py").read_text(encoding="utf-8")
    api = re.search(r"^API_VERSION = \((\d+), \d+\)$", hooks, re.MULTILINE)
    assert api is not None
    values = {
        "name": name,
        "distribution": f"comm-{name}",
        "module": module,
        "class": "".join(part.capitalize() for part in name.split("-")),
        "group": f"comm_core.v{api[1]}",
        "core_requirement": core_requirement(
            str(_load("_comm_core_version", CORE / "src" / "comm_core" / "_version.py").__version__)
        ),
    }
    with tempfile.TemporaryDirectory(prefix=f".comm-{name}.", dir=into) as scratch:
        draft = Path(scratch) / target.name
        for source in sorted(TEMPLATES.rglob("*.tmpl")):
            relative = source.relative_to(TEMPLATES).with_suffix("")
            parts = [part.replace("test_module_", f"test_{module[5:]}_") for part in relative.parts]
            path = draft.joinpath(*(module if part == "module" else part for part in parts))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_fill(source.read_text(encoding="utf-8"), values), encoding="utf-8")
        shutil.copyfile(ROOT / "LICENSE", draft / "LICENSE")
        shutil.copyfile(CORE / "changelog.d" / "README.md", draft / "changelog.d" / "README.md")
        draft.rename(target)
    return target


def _fill(text: str, values: dict[str, str]) -> str:
    # An @name@ that is not in `values` is a mistake in the template, and a KeyError here.
    filled = re.sub(r"@([a-z_]+)@", lambda match: values[match[1]], text)
    # Where a plugin's own imports stand among those of comm-core depends on its name.
    return re.sub(r"(?m)(^(from|import) comm_.*\n)+", lambda match: _sort_imports(match[0]), filled)


def _sort_imports(block: str) -> str:
    """Sort import lines as ruff does within a section: the plain ones first, each kind by module."""
    lines = block.splitlines(keepends=True)
    return "".join(sorted(lines, key=lambda line: (line.startswith("from "), line.split()[1])))


def main(argv: list[str]) -> int:
    """Write the package that `argv` names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="new_plugin.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", metavar="NAME", help="for example fastlink")
    parser.add_argument(
        "--into", metavar="DIR", type=Path, default=ROOT / "packages", help="where to put it (default: packages/)"
    )
    arguments = parser.parse_args(argv)
    try:
        folder = write(arguments.name, arguments.into)
    except PluginNameError as error:
        print(f"new_plugin.py: {error}", file=sys.stderr)
        return 1
    print(f"wrote {folder}")
    if folder.parent.resolve() == (ROOT / "packages").resolve():
        print(f"next: python tools/dev.py test {folder.relative_to(ROOT) if folder.is_absolute() else folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
