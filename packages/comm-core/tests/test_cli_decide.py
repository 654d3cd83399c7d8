"""commctl decide: the decision of ranks that were never started must be the one that real ranks make."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from comm_core import plugins
from comm_core._json import JsonObject
from comm_core.cli import decide as command
from comm_core.cli.decide import Options, imagined_ranks, with_probes
from comm_core.errors import ArgumentValueError, CommError
from comm_core.group import Group, StoreGroup, thread_groups
from comm_core.plugins.discovery import Registry
from comm_core.selection import Asked, Decision, resolve
from comm_core.selection.offline import Wanted, look
from comm_core.testing import topologies
from comm_core.testing.cli import commctl, topology_file
from comm_core.testing.ranks import on_threads
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import ProbeContext, Request, Transport, Verdict


class Mesh(Transport):
    """A stand-in for a plugin's transport."""

    version = "1.0"
    wire = 1

    def __init__(self, name: str = "nvlink", priority: int = 100, experimental: bool = False) -> None:
        self.name, self.priority, self.experimental = name, priority, experimental

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        return predicates.assess_nvlink(facts, allow_shared_gpu=request.allow_shared_gpu)

    def open(self, stages: Any, request: Request, plan: JsonObject | None, device: Any) -> Any:
        raise AssertionError("a decision opens nothing")


def registry(*extra: Transport) -> Registry:
    base = plugins.registry()
    return Registry(list(base.reports), {**base.transports, **{item.name: item for item in extra}})


class Claims(StoreGroup):
    """A thread rank that claims a process group with NCCL."""

    @property
    def backends(self) -> dict[str, str]:
        return {"cuda": "nccl"}


def really_decided(size: int, backend: str, found: Registry) -> Decision | str:
    """Return what `size` ranks decide, or the error that all of them raise."""
    members: list[Group] = [
        Claims(own._channel, own.rank, size, name="claims", timeout_s=20.0) for own in thread_groups(size)
    ]
    asked = Asked("decide", backend, torch.device("cuda", 0), "bfloat16", 2)
    results = on_threads(members, lambda group: resolve(group, asked, found))
    assert len({str(result) for result in results}) == 1
    first = results[0]
    return first if isinstance(first, Decision) else str(first)


@pytest.mark.parametrize("backend", ["auto", "nvlink", "nccl", "gloo", "pcie", "nonsense"])
@pytest.mark.parametrize(
    ("facts", "experimental"),
    [
        (topologies.nvlink_mesh(4), False),
        (topologies.nvlink_mesh(4), True),
        (topologies.pairwise_bridges(4), False),
        (topologies.two_hosts()[2:6], False),
        (topologies.mig_slices(2), False),
    ],
    ids=["mesh", "experimental", "bridges", "hosts", "mig"],
)
def test_the_imagined_ranks_decide_as_real_ones(
    facts: list[RankFacts], experimental: bool, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The same backend, reasons, order, plan and error text: commctl that explains another decision misleads."""
    facts = [replace(record, rank=rank, recorded=True) for rank, record in enumerate(facts)]
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", topology_file(tmp_path, facts))
    found = registry(Mesh(experimental=experimental))
    expected = really_decided(len(facts), backend, found)
    got: Decision | str
    try:
        got = look(facts, found, Wanted(backend, {"cuda": "nccl"}, "bfloat16", 2)).choose()
    except CommError as error:
        got = str(error)
    if isinstance(expected, str):
        assert got == expected
        return
    assert isinstance(got, Decision)
    for name in ("backend", "reason", "plan", "considered", "facts", "shared_gpu", "recorded"):
        assert getattr(got, name) == getattr(expected, name), name


def test_ranks_out_of_order_are_refused():
    facts = topologies.nvlink_mesh(2)
    for wrong in ([], facts[::-1], facts[1:]):
        with pytest.raises(ArgumentValueError, match="in order"):
            look(wrong, plugins.registry(), Wanted())


def test_the_document_has_the_decision_and_what_the_topology_admits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Installed is one thing and admitted another: both are answered for every known transport."""
    path = topology_file(tmp_path, topologies.nvlink_mesh(8))
    assert commctl("decide", "--file", path, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world_size"] == 8 and document["error"] is None
    assert document["decision"]["backend"] == "nccl"
    admits = {item["name"]: item["eligible"] for item in document["topology"]["admits"]}
    assert admits == {"nvlink": True, "pcie": True, "mnnvl": True}
    assert document["topology"]["backend"] == "nvlink"
    considered = {item["name"]: item for item in document["considered"]}
    assert set(considered) == {"nvlink", "pcie", "mnnvl", "windows", "windows-ce", "nccl", "gloo"}
    assert "comm-mnnvl" in considered["mnnvl"]["reason"]


def test_a_refused_backend_exits_with_1_and_still_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = topology_file(tmp_path, topologies.mig_slices(2))
    assert commctl("decide", "--file", path, "--backend", "nvlink", "--json") == 1
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["decision"] is None and "'nvlink' was asked for" in document["error"]
    assert captured.err == f"commctl: {document['error']}\n"
    assert commctl("decide", "--file", path, "--backend", "nvlink") == 1
    captured = capsys.readouterr()
    assert "every rank would raise" in captured.out and "MIG" in captured.out


def test_the_tables_fit_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert commctl("decide", "--file", topology_file(tmp_path, topologies.two_islands(8))) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "Decision: nccl" in text


def test_ranks_are_chosen_and_numbered_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two bridged GPUs have NVLink although the whole machine has none."""
    path = topology_file(tmp_path, topologies.pairwise_bridges(4))
    assert commctl("decide", "--file", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["topology"]["backend"] == "nccl"
    assert commctl("decide", "--file", path, "--ranks", "3,2", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["topology"]["backend"] == "nvlink"
    assert [(item["rank"], item["uuid"]) for item in document["ranks"]] == [
        (0, topologies.gpu_uuid(3)),
        (1, topologies.gpu_uuid(2)),
    ]


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        (Options(ranks="0,7"), "no rank 7"),
        (Options(ranks="0;1"), "expected ranks like"),
        (Options(ranks="0", world_size=1), "not both"),
        (Options(world_size=5), "fewer than 5"),
    ],
)
def test_ranks_that_a_file_does_not_have_are_wrong_usage(options: Options, needle: str):
    with pytest.raises(typer.BadParameter, match=needle):
        imagined_ranks(topologies.nvlink_mesh(4), options, recorded=True)


def test_more_ranks_than_gpus_share_them_and_that_is_refused_as_in_reality(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On this machine ranks go round the GPUs; without the opt-in every rank raises, with it the decision says so."""
    monkeypatch.setattr(command, "machine_or_file", lambda file: (topologies.nvlink_mesh(2), "this machine"))
    assert commctl("decide", "--world-size", "4", "--group-backend", "gloo", "--json") == 1
    assert "ranks share a GPU" in json.loads(capsys.readouterr().out)["error"]
    monkeypatch.setenv("COMM_ALLOW_SHARED_GPU", "1")
    assert commctl("decide", "--world-size", "4", "--group-backend", "gloo", "--json") == 0
    assert json.loads(capsys.readouterr().out)["decision"] == {
        "backend": "gloo",
        "reason": "the process group has gloo for cuda tensors",
        "plan": None,
        "shared_gpu": True,
    }


def test_a_machine_without_a_gpu_is_asked_for_two_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One rank would only be told that it exchanges nothing."""
    monkeypatch.setattr(command, "machine_or_file", lambda file: (topologies.cpu_host(1), "this machine"))
    assert commctl("decide", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["world_size"], document["decision"]["backend"]) == (2, "gloo")
    assert commctl("decide", "--world-size", "1", "--json") == 0
    assert "passthrough" in json.loads(capsys.readouterr().out)["decision"]["reason"]


def test_the_experimental_option_is_the_opt_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = topology_file(tmp_path, topologies.pcie_root_complex(4))
    assert commctl("decide", "--file", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["topology"]["backend"] == "nccl"
    assert commctl("decide", "--file", path, "--experimental", "--json") == 0
    assert json.loads(capsys.readouterr().out)["topology"]["backend"] == "pcie"


def test_a_probe_that_fails_or_hangs_becomes_a_fact(monkeypatch: pytest.MonkeyPatch):
    """A plugin's own probe runs in commctl as well, and can't take it down or hold it up."""

    class Probing(Mesh):
        def probe(self, context: ProbeContext) -> JsonObject:
            if self.name == "raises":
                raise SystemExit("gone")
            if self.name == "hangs":
                time.sleep(60)
            return {"device": context.facts.device.uuid}

    monkeypatch.setattr(command, "_PROBE_S", 0.2)
    found = registry(*(Probing(name) for name in ("fine", "raises", "hangs")))
    (record,) = with_probes(topologies.nvlink_mesh(1), found)
    assert record.plugins == {
        "fine": {"device": topologies.gpu_uuid(0)},
        "raises": {"error": "SystemExit: gone"},
        "hangs": {"error": "no answer within 0.2 s"},
    }


def test_an_element_type_that_can_not_be_moved_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    for name in ("float64", "nonsense", "Tensor"):
        assert commctl("decide", "--dtype", name) == 2
        assert name in capsys.readouterr().err
