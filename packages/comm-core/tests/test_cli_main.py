"""commctl as a whole: cheap to start, clean output, one line for an error, and plugins that can't break it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import typer

from comm_core import plugins
from comm_core._version import __version__
from comm_core.plugins import discovery
from comm_core.plugins.hookspecs import hookimpl
from comm_core.testing.cli import commctl


@pytest.fixture
def plugin() -> Generator[Any]:
    """Register a plugin for the test."""
    names: list[str] = []

    def add(name: str, made: object) -> plugins.PluginReport:
        names.append(name)
        return plugins.register(name, made)

    yield add
    for name in names:
        plugins.unregister(name)


def with_commands(*commands: object) -> object:
    class Plugin:
        @hookimpl
        def comm_commands(self) -> list[Any]:
            return list(commands)

    return Plugin()


def greeting() -> typer.Typer:
    made = typer.Typer()

    @made.command()
    def greet(name: str = "nobody") -> None:
        """Say hello."""
        print(f"hello {name}")

    return made


def modules_after(*arguments: str) -> set[str]:
    """Return the modules that a commctl process has imported when it ends."""
    code = (
        "import sys, atexit, json\n"
        "atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))\n"
        "from comm_core.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stderr.strip().splitlines()[-1]))


def test_help_imports_neither_torch_nor_rich_nor_plugins():
    """The answer to --help must come at once; each of these costs more than everything else together."""
    loaded = modules_after("--help")
    assert "comm_core.cli.main" in loaded
    assert not {"torch", "rich", "pluggy", "comm_core.plugins", "comm_core.cli.topo"} & loaded


def test_topo_initializes_no_cuda():
    """A machine that only asks must not get a CUDA context; without torch in the process there can't be one."""
    assert "torch" not in modules_after("topo", "--json")


def test_version(capsys: pytest.CaptureFixture[str]):
    assert commctl("--version") == 0
    assert capsys.readouterr().out.split() == ["commctl", "(comm-core)", __version__]


@pytest.mark.parametrize("arguments", [("topp",), ("topo", "--fil", "x"), ("decide", "--world-size", "0")])
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert commctl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "commctl" in captured.err and "Traceback" not in captured.err


def test_an_error_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What is wrong belongs on stderr in one line that names the file, and never a traceback."""
    bad = tmp_path / "bad.json"
    bad.write_text("{\n1")
    assert commctl("topo", "--file", str(bad), "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("commctl: ") and captured.err.count("\n") == 1 and str(bad) in captured.err


def test_json_is_alone_on_standard_output(plugin: Any, capfd: pytest.CaptureFixture[str]):
    """A plugin that prints, from Python or from native code, must not get into a document that a program reads."""

    class Noisy:
        @hookimpl
        def comm_transports(self) -> list[Any]:
            print("noise from Python")
            os.write(1, b"noise from C\n")
            return []

    plugin("noisy", Noisy())
    discovery._State.current = None
    capfd.readouterr()
    assert commctl("plugins", "--json") == 0
    captured = capfd.readouterr()
    reports = json.loads(captured.out)["plugins"]
    # Plugins that are installed here are kept out of tests, and listed as that.
    assert [item["name"] for item in reports if item["state"] != "blocked"] == ["dist", "noisy"]
    assert "noise from Python" in captured.err and "noise from C" in captured.err
    # And standard output is what it was.
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"


def test_a_plugin_adds_a_command(plugin: Any, capsys: pytest.CaptureFixture[str]):
    plugin("hello", with_commands(("greet", greeting())))
    assert commctl("greet", "--name", "world") == 0
    assert capsys.readouterr().out == "hello world\n"
    assert commctl("greet", "--help") == 0
    assert "Say hello." in capsys.readouterr().out
    assert commctl("plugins") == 0
    assert "Commands of plugins: greet" in capsys.readouterr().out


def test_a_plugin_adds_a_benchmark(plugin: Any, capsys: pytest.CaptureFixture[str]):
    """`bench NAME` puts it beside the benchmarks of comm-core, which it can't replace."""
    plugin("hello", with_commands(("bench greet", greeting()), ("bench ulysses", greeting())))
    assert commctl("bench", "greet", "--name", "world") == 0
    assert capsys.readouterr().out == "hello world\n"
    assert commctl("bench", "--help") == 0
    listed = capsys.readouterr().out
    assert "Say hello." in listed and listed.count("ulysses") == 1
    assert commctl("bench", "ulysses", "--help") == 0
    assert "--geometry" in capsys.readouterr().out
    assert commctl("greet") == 2 and commctl("bench", "nothing") == 2


@pytest.mark.parametrize("name", ["topo greet", "bench greet often", "bench  greet", " greet", ""])
def test_a_command_that_nobody_could_call_is_reported(plugin: Any, name: str, capsys: pytest.CaptureFixture[str]):
    plugin("hello", with_commands((name, greeting())))
    assert commctl("plugins", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["commands"] == []
    (error,) = found["command_errors"]
    assert "one word, or 'bench NAME'" in error and repr(name) in error


def test_a_plugin_can_not_replace_a_built_in_command(plugin: Any, capsys: pytest.CaptureFixture[str]):
    plugin("hello", with_commands(("plugins", greeting())))
    assert commctl("plugins", "--json") == 0
    assert json.loads(capsys.readouterr().out)["plugins"][0]["name"] == "dist"


def test_broken_commands_cost_themselves_alone(plugin: Any, capsys: pytest.CaptureFixture[str]):
    """An entry that is no command, and one that typer refuses, leave the others and commctl itself as they were."""
    refused = typer.Typer()  # without a command in it

    plugin("hello", with_commands("nonsense", ("empty", refused), ("greet", greeting()), ("greet", greeting())))
    assert commctl("greet") == 0
    assert capsys.readouterr().out == "hello nobody\n"
    assert commctl("empty") == 1
    error = capsys.readouterr().err
    assert error.startswith("commctl: the command 'empty' of a plugin can't be used") and error.count("\n") == 1
    assert commctl("plugins", "--json") == 0
    wrong = json.loads(capsys.readouterr().out)["command_errors"]
    assert len(wrong) == 2 and "'nonsense'" in wrong[0] and "'greet'" in wrong[1]


def test_an_unknown_command_names_the_plugin_that_may_have_had_it(plugin: Any, capsys: pytest.CaptureFixture[str]):
    class Broken:
        @hookimpl
        def comm_commands(self) -> list[Any]:
            raise OSError("libfoo.so is missing")

    assert plugin("foo", Broken()).state == "broken"
    assert commctl("foo-tool") == 2
    error = capsys.readouterr().err
    assert "plugin 'foo' is broken" in error and "libfoo.so is missing" in error and "No such command" in error


def test_plugins_lists_what_became_of_each(
    plugin: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A broken plugin is listed with its cause, costs exit code 1 with --strict alone, and hides nobody else."""

    class Broken:
        comm_api = (1, 99)

    plugin("newer", Broken())
    assert commctl("plugins") == 0
    text = capsys.readouterr().out
    assert "incompatible" in text and "newer: incompatible: it needs hook API 1.99" in " ".join(text.split())
    assert commctl("plugins", "--json", "--strict") == 1
    reports = {item["name"]: item for item in json.loads(capsys.readouterr().out)["plugins"]}
    assert reports["dist"]["state"] == "loaded" and reports["dist"]["modules"] == [
        "comm_core_selfcheck",
        "comm_core_windows",
    ]
    assert reports["dist"]["transports"] == ["windows", "windows-ce", "nccl", "gloo"]
    assert reports["newer"]["state"] == "incompatible"
    keys = {"name", "distribution", "version", "api", "state", "error", "warnings", "transports", "codecs"}
    assert set(reports["dist"]) == keys | {"allreduce", "modules", "seconds"}
    plugins.unregister("newer")
    monkeypatch.delenv("COMM_BLOCK_PLUGINS")
    assert commctl("plugins", "--strict") == 0
