"""Discovery: whatever one plugin does, the others load, and what became of each is kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from comm_core import plugins
from comm_core._json import JsonObject
from comm_core.errors import PluginError
from comm_core.plugins import discovery
from comm_core.plugins.discovery import PluginReport, Registry, discover
from comm_core.plugins.discovery import _Found as Found
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.transport.interface import Request, Transport, Verdict


class Tin(Transport):
    """A transport that is never opened."""

    version = "1.2"
    wire = 1
    priority = 5

    def __init__(self, name: str) -> None:
        self.name = name

    def assess(self, request: Request, facts: Sequence[Any]) -> Verdict:
        return Verdict(True, "always")

    def open(self, stages: Any, request: Request, plan: JsonObject | None, device: Any) -> Any:
        raise AssertionError


def plugin(*names: str, api: object = API_VERSION) -> object:
    class Plugin:
        comm_api = api

        @hookimpl
        def comm_transports(self) -> list[Transport]:
            return [Tin(name) for name in names]

    return Plugin()


def found(name: str, load: Callable[[], object] | object, distribution: str = "") -> Found:
    return Found(name, load if callable(load) else lambda: load, distribution or f"dist-{name}", "1.0")


def by_name(registry: Registry) -> dict[str, PluginReport]:
    return {report.name: report for report in registry.reports}


def failing(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


@pytest.mark.parametrize(
    "error",
    [
        ImportError("no module named comm_x"),
        OSError("libx.so: cannot open shared object file"),
        SyntaxError("invalid syntax"),
        SystemExit(1),
        RuntimeError("driver too old"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_one_broken_plugin_costs_only_itself(error: BaseException) -> None:
    """M1, V13: the broken one is reported with its cause, the rest load."""
    registry = discover([found("bad", failing(error)), found("good", plugin("good"))])
    reports = by_name(registry)
    assert reports["bad"].state == "broken" and str(error.args[0]) in (reports["bad"].error or "")
    assert reports["good"].state == "loaded" and set(registry.transports) == {"good"}


def test_an_interrupt_while_loading_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        discover([found("bad", failing(KeyboardInterrupt()))])


def test_what_a_broken_plugin_prints_and_sets_is_contained(capsys: pytest.CaptureFixture[str]) -> None:
    """M1: `commctl … --json` prints one document; a half-loaded plugin must not steer the others by environment."""

    def load() -> object:
        print("hello from import")
        os.environ["COMM_CHECK"] = "1"
        raise ImportError("half-way")

    discover([found("loud", load)])
    captured = capsys.readouterr()
    assert captured.out == "" and "hello" in captured.err
    assert "COMM_CHECK" not in os.environ


def test_asking_for_a_broken_plugin_by_name_gives_the_stored_cause() -> None:
    """M2."""
    registry = discover([found("nvlink", failing(OSError("libcuda.so.1: not found")), "comm-nvlink")])
    with pytest.raises(PluginError, match=r"comm-nvlink 1\.0.*broken.*libcuda\.so\.1"):
        registry.transport("nvlink")


def test_asking_for_an_unknown_name_lists_what_was_found_and_a_known_one_says_what_to_install() -> None:
    """M5."""
    registry = discover([found("good", plugin("good"))])
    with pytest.raises(PluginError, match="no plugin provides 'warp'; found: good"):
        registry.transport("warp")
    with pytest.raises(PluginError, match="pip install comm-pcie"):
        registry.transport("pcie")


def test_two_distributions_with_one_name_are_both_refused_and_the_rest_load() -> None:
    """M3."""
    registry = discover(
        [found("x", plugin("x"), "first"), found("x", plugin("x"), "second"), found("good", plugin("good"))]
    )
    assert [report.state for report in registry.reports if report.name == "x"] == ["duplicate", "duplicate"]
    assert set(registry.transports) == {"good"}
    assert "second" in (registry.reports[1].error or "")


def test_a_built_in_name_can_not_be_taken() -> None:
    builtin = Found("dist", lambda: plugin("gloo"), "comm-core", "1", built_in=True)
    registry = discover([found("evil", plugin("gloo")), found("dist", plugin("other")), builtin])
    states = {(report.distribution, report.state) for report in registry.reports}
    assert states == {("comm-core", "loaded"), ("dist-evil", "duplicate"), ("dist-dist", "duplicate")}


@pytest.mark.parametrize(
    ("api", "fix"),
    [
        ((API_VERSION[0] + 1, 0), "upgrade comm-core"),
        ((API_VERSION[0], API_VERSION[1] + 1), "upgrade comm-core"),
        ((0, 9), "upgrade the plugin"),
        ("one", "must be"),
    ],
)
def test_a_plugin_for_another_hook_api_is_left_out_with_the_reason(api: object, fix: str) -> None:
    """M6."""
    registry = discover([found("x", plugin("x", api=api))])
    assert registry.reports[0].state == "incompatible" and fix in (registry.reports[0].error or "")
    assert not registry.transports


def test_a_hook_that_nobody_calls_is_reported() -> None:
    """M6, V13: a misspelt hook is silent in pluggy until somebody asks."""

    class Misspelt:
        @hookimpl
        def comm_transport(self) -> list[Transport]:
            return []

    report = discover([found("typo", Misspelt())]).reports[0]
    assert report.state == "loaded" and "comm_transport" in report.warnings[0]


def test_an_older_plugin_with_fewer_hook_arguments_still_loads() -> None:
    """What lets a minor release add arguments: an implementation may take fewer than the specification has."""
    assert discover([found("x", plugin("x", api=(API_VERSION[0], 0)))]).reports[0].state == "loaded"


@pytest.mark.parametrize("attribute", ["name", "version", "wire"])
def test_a_transport_without_its_identity_breaks_its_plugin_alone(attribute: str) -> None:
    tin = Tin("x")
    setattr(tin, attribute, None)

    class Plugin:
        @hookimpl
        def comm_transports(self) -> list[Transport]:
            return [tin]

    registry = discover([found("x", Plugin()), found("good", plugin("good"))])
    assert by_name(registry)["x"].state == "broken" and attribute in (by_name(registry)["x"].error or "")
    assert set(registry.transports) == {"good"}


def test_a_hook_that_raises_hides_nobody() -> None:
    """V13: in one multicall, one raising implementation would hide all others."""

    class Raises:
        @hookimpl
        def comm_transports(self) -> list[Transport]:
            raise ValueError("boom")

    registry = discover([found("a", Raises()), found("b", plugin("b"))])
    assert by_name(registry)["a"].state == "broken" and set(registry.transports) == {"b"}


def test_blocking_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = discover([found("a", plugin("a")), found("b", plugin("b"))], frozenset({"a"}))
    assert by_name(registry)["a"].state == "blocked" and set(registry.transports) == {"b"}
    monkeypatch.setenv("COMM_BLOCK_PLUGINS", "*")
    assert set(plugins.registry().transports) == {"gloo", "nccl", "windows", "windows-ce"}


def test_a_blocked_plugin_takes_no_name_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests register a plugin by code under its own name, whether or not it is installed as well."""
    pair = [found("a", plugin("a"), "installed"), Found("a", lambda: plugin("a"))]
    assert [report.state for report in discover(pair).reports] == ["duplicate", "duplicate"]
    registry = discover(pair, frozenset({"*"}))
    assert [(report.distribution, report.state) for report in registry.reports] == [
        ("", "loaded"),
        ("installed", "blocked"),
    ]
    assert set(registry.transports) == {"a"}
    assert not discover(pair, frozenset({"a"})).transports
    monkeypatch.setattr(discovery, "_entry_points", lambda: [found("a", plugin("a"), "installed")])
    monkeypatch.setenv("COMM_BLOCK_PLUGINS", "*")
    try:
        assert plugins.register("a", plugin("a")).state == "loaded"
    finally:
        plugins.unregister("a")


def test_plugins_can_be_registered_by_code_and_removed() -> None:
    report = plugins.register("mine", plugin("mine"))
    try:
        assert report.state == "loaded" and "mine" in plugins.registry().transports
    finally:
        plugins.unregister("mine")
    assert "mine" not in plugins.registry().transports


def test_tracing_shows_every_hook_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COMM_TRACE_HOOKS", "1")
    discover([found("a", plugin("a"))])
    assert "comm_transports" in capsys.readouterr().err


def test_entry_points_are_read_from_the_path_and_one_distribution_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M3, M5: an old egg-info beside a dist-info is one plugin; an import error in it is reported with its name."""
    for info in ("comm_probe-0.1.dist-info", "comm_probe.egg-info"):
        folder = tmp_path / info
        folder.mkdir()
        meta = "METADATA" if info.endswith("dist-info") else "PKG-INFO"
        (folder / meta).write_text("Metadata-Version: 2.1\nName: comm-probe\nVersion: 0.1\n")
        (folder / "entry_points.txt").write_text("[comm_core.v1]\nprobe = comm_probe_missing.plugin\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COMM_BLOCK_PLUGINS", "something-else")
    reports = [report for report in plugins.report() if report.name == "probe"]
    assert [(report.state, report.distribution) for report in reports] == [("broken", "comm-probe")]
    assert "comm_probe_missing" in (reports[0].error or "")
