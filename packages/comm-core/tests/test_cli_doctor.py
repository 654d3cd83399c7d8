"""commctl doctor: says what is there, what is usable and why not, and finds what is broken."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

import pytest

from comm_core import _env, known, plugins
from comm_core.cli.main import main
from comm_core.plugins import discovery
from comm_core.plugins.hookspecs import hookimpl
from comm_core.testing.cli import commctl


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run commctl doctor --json and return exit code and document."""
    return commctl("doctor", "--json", *arguments), json.loads(capsys.readouterr().out)


@pytest.fixture
def broken_plugin() -> Generator[None]:
    class Broken:
        @hookimpl
        def comm_transports(self) -> list[Any]:
            raise ImportError("libnvlink.so.1: cannot open shared object file")

    plugins.register("nvlink", Broken())
    yield
    plugins.unregister("nvlink")


def test_everything_known_is_listed(capsys: pytest.CaptureFixture[str]):
    """Each transport and codec is either here, with what it was verified on, or missing, with how to get it."""
    code, document = doctor(capsys, "--strict")
    assert code == 0 and document["problems"] == []
    rows = {row["name"]: row for row in document["transports"]}
    assert set(rows) == set(known.TRANSPORTS)
    assert rows["gloo"]["installed"] and "CPU processes" in rows["gloo"]["verified_on"]
    missing = {name for name, row in rows.items() if not row["installed"]} | set(known.CODECS)
    assert set(document["missing"]) == missing
    assert document["missing"]["nvlink"].startswith("install it with: pip install comm-nvlink")
    assert {"comm-core", "Python", "torch", "NVIDIA driver", "NCCL of torch"} <= set(document["versions"])


def test_every_variable_is_shown_with_its_value(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COMM_CHECK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-secret")
    _, document = doctor(capsys)
    environment = document["environment"]
    assert set(_env.VARIABLES) | {"CUDA_MODULE_LOADING"} <= set(environment)
    assert environment["COMM_CHECK"]["value"] == "1"
    assert environment["COMM_TIMEOUT_S"]["value"] is None
    assert "GPU-secret" not in json.dumps(document)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMM_TIMEOUT_S", "soon"),
        ("COMM_CHECK", "yes"),
        ("COMM_TRACE_HOOKS", "2"),
        ("COMM_TOPOLOGY_FILE", "/no/file"),
    ],
)
def test_a_variable_with_an_invalid_value_is_a_problem(
    name: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Ranks would raise because of it, so doctor must say so, and go on with the rest."""
    monkeypatch.setenv(name, value)
    discovery._State.current = None
    code, document = doctor(capsys, "--strict")
    assert code == 1
    assert any(value in text for text in document["problems"])
    assert doctor(capsys)[0] == 0


def test_a_broken_plugin_is_a_problem_and_hides_nothing(capsys: pytest.CaptureFixture[str], broken_plugin: None):
    code, document = doctor(capsys, "--strict")
    assert code == 1
    (problem,) = document["problems"]
    assert "plugin 'nvlink'" in problem and "libnvlink.so.1" in problem
    rows = {row["name"]: row for row in document["transports"]}
    assert not rows["nvlink"]["installed"] and "libnvlink.so.1" in rows["nvlink"]["reason"]
    assert rows["gloo"]["installed"]


def test_the_tables_fit_80_columns(capsys: pytest.CaptureFixture[str], broken_plugin: None):
    with pytest.raises(SystemExit):
        main(["doctor"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    for name in _env.VARIABLES:
        assert name in text
    assert "libnvlink.so.1" in text
