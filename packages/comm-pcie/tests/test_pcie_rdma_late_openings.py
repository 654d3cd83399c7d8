"""Openings of sessions over NICs that fail late: a NIC that holds on to memory, a process that dies, memory refused.

Between processes, over the emulator. The failure of each step, on each rank, is in ``test_pcie_rdma_failures.py``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import rdma_host as host

from comm_core.errors import GroupTimeoutError, UlyssesBackendError
from comm_core.testing.ranks import RankPool

AT_ONCE_S = 12.0
"""Within this all ranks have an outcome, on a busy machine."""


def unsafe_opening(group: Any) -> tuple[str, list[str], float]:
    begin = time.monotonic()
    with host.installed(), pytest.raises(UlyssesBackendError) as refused:
        host.communicator(group)
    cause: Any = refused.value.__cause__
    return str(refused.value), cause.__notes__, time.monotonic() - begin


def test_a_nic_that_holds_on_to_memory_in_the_self_test_is_everybody_s_error(
    ranks: RankPool, rdma_libraries: dict[str, str], tmp_path: Path
) -> None:
    """Its rank tries to stop it for less time than the others wait for its word; nothing is released on any rank."""
    fabric = host.Fabric(rdma_libraries, tmp_path)
    fabric.world.expect_leaks = True
    fabric.world.rule("lose verb=write_imm nic=mlx5_1 count=1")
    found = ranks.run(unsafe_opening, ranks=2, env=fabric.environment(COMM_TIMEOUT_S="2"))
    assert found[0][:2] == found[1][:2] and all(seconds < AT_ONCE_S for *_, seconds in found)
    text, notes, _ = found[0]
    assert "self-test of the NICs: rank 0" in text and "rank 1" in text and "holds on to memory" in text
    assert "take down 'prepare to test': rank 1: the NIC holds on to memory" in notes[0]
    assert fabric.world.alive()["regions"] == 4
    # As a caller must: these processes go, and with them what they hold.
    ranks.kill()
    fabric.world.reap()
    fabric.world.close()


def test_a_nic_is_stopped_for_less_time_than_the_group_waits() -> None:
    """In a call and again in close: both together are shorter than the deadline of the vote."""
    from comm_pcie.rdma.session import quiesce_ns

    assert [quiesce_ns(seconds) for seconds in (1, 8, 60)] == [250_000_000, 2_000_000_000, 10_000_000_000]


def dies_while_opening(group: Any, step: str, culprit: int) -> tuple[str, float]:
    from comm_pcie.rdma.engine import RdmaEngine, RegisteredPair

    if group.rank() == culprit:
        owner = RegisteredPair if step in ("attach", "exchange") else RdmaEngine
        setattr(owner, step, lambda *_: os._exit(7))
    begin = time.monotonic()
    with host.installed(), pytest.raises((GroupTimeoutError, UlyssesBackendError)) as refused:
        host.communicator(group)
    return str(refused.value), time.monotonic() - begin


@pytest.mark.parametrize("step", ["connect", "attach", "exchange"])
def test_a_process_that_dies_while_opening_is_named(
    ranks: RankPool, rdma_libraries: dict[str, str], tmp_path: Path, step: str
) -> None:
    """Before its queue pairs are connected, before it knows the keys, and when the others write to it."""
    fabric = host.Fabric(rdma_libraries, tmp_path)
    env = fabric.environment(COMM_TIMEOUT_S="1")
    outcomes = ranks.run_outcomes(dies_while_opening, step, 1, ranks=3, env=env)
    assert [outcome.kind for outcome in outcomes] == ["value", "died", "value"], outcomes
    for outcome in (outcomes[0], outcomes[2]):
        text, seconds = outcome.value
        assert "rank 1" in text and seconds < AT_ONCE_S, outcome
    assert fabric.world.reap() == 1
    fabric.world.close()


class _TwoForms(host.HostTransport):
    """With two forms of memory to try, as on a GPU; host memory has one, and is asked for again."""

    asked: ClassVar[list[str]] = []

    def _open_nics(self, stages: Any, request: Any, agreed: Any, device: Any, modules: Any) -> Any:
        session = self._try_nics(stages.group, request, agreed, device, modules, ("auto", "cuda_ipc"))
        return stages.step("keep the route", lambda: session, lambda opened: opened.close())

    def make_port(self, request: Any, agreed: Any, device: Any, modules: Any, form: str, *rest: Any) -> Any:
        self.asked.append(form)
        return super().make_port(request, agreed, device, modules, form, *rest)


def forms_tried(group: Any) -> tuple[list[str], str]:
    _TwoForms.asked.clear()
    with host.installed(_TwoForms):
        try:
            with host.communicator(group) as comm:
                assert host.session_of(comm).counters.writes > 0
            text = ""
        except UlyssesBackendError as error:
            text = str(error)
    return _TwoForms.asked, text


@pytest.mark.parametrize(
    ("verb", "count", "asked"),
    [("reg_mr", 1, ["auto", "cuda_ipc"]), ("reg_mr", 2, ["auto", "cuda_ipc"]), ("create_qp", 1, ["auto"])],
)
def test_memory_that_can_not_be_registered_is_tried_in_the_older_form(
    ranks: RankPool, fabric: Any, verb: str, count: int, asked: list[str]
) -> None:
    """J3: once, by all ranks, and only if it is the registration that has failed."""
    fabric.world.rule(f"fail verb={verb} nic=mlx5_1 value=95 count={count}")
    found = ranks.run(forms_tried, ranks=2, env=fabric.environment())
    assert found[0] == found[1] and found[0][0] == asked
    assert (found[0][1] == "") == (verb == "reg_mr" and count == 1)
