"""The contract suite: transports that keep it pass, and ones that break it in one point fail in that test."""

from __future__ import annotations

import pytest
import torch

from comm_core.plugins.hookspecs import hookimpl
from comm_core.testing.contract import TransportContract
from comm_core.testing.faults import FaultyTransport, Injector
from comm_core.testing.ranks import RankError
from comm_core.transport.dist import DistSession, DistTransport
from comm_core.transport.interface import Verdict


class TestGloo(TransportContract):
    transport = "gloo"


class Provide:
    def __init__(self, transport):
        self.transport = transport

    @hookimpl
    def comm_transports(self):
        return [self.transport]


def fake():
    """A transport with a collective close, opened in steps."""
    return Provide(FaultyTransport(Injector(0, [])))


class TestFake(TransportContract):
    transport = "fake"
    plugin = fake
    world_sizes = (3,)
    dtypes = (torch.float8_e5m2, torch.bfloat16, torch.float32)


class Relabelled(DistTransport):
    """Gloo under another name, and with another session."""

    session = DistSession

    def __init__(self):
        super().__init__("wrong", ("cpu",), 0)

    def assess(self, request, facts):
        have = request.group_backends.get("cpu") == "gloo"
        return Verdict(have, "gloo under another name" if have else "no gloo")

    def open(self, stages, request, plan, device):
        return self.session(stages.group, device)


class FlipsABit(DistSession):
    """Changes one bit of what it gathers."""

    def exchange(self, plan, sources, destination, *, staging=None):
        super().exchange(plan, sources, destination, staging=staging)
        if plan.operation == "gather_heads":
            destination.view(torch.uint8).view(-1)[-1:].bitwise_xor_(0x80)


class IgnoresStrides(DistSession):
    """Reads the elements of a strided operand one off."""

    def exchange(self, plan, sources, destination, *, staging=None):
        moved = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in sources]
        for x, y in zip(sources, moved, strict=True):
            y.copy_(x if x.is_contiguous() else x.roll(1, -1))
        super().exchange(plan, moved, destination, staging=staging)


class Remembers(Relabelled):
    """An assessment that depends on how often it was asked."""

    asked = 0

    def assess(self, request, facts):
        self.asked += 1
        return Verdict(True, f"asked {self.asked} times")


class LeavesEarly(DistSession):
    def barrier(self):
        return


def make(session=DistSession, base=Relabelled):
    transport = base()
    transport.session = session
    return Provide(transport)


def relabelled():
    return make()


def flips_a_bit():
    return make(FlipsABit)


def ignores_strides():
    return make(IgnoresStrides)


def remembers():
    return make(base=Remembers)


def leaves_early():
    return make(LeavesEarly)


OPERATIONS = TransportContract.test_operations_equal_the_references


@pytest.mark.parametrize(
    ("plugin", "test", "text"),
    [
        (relabelled, OPERATIONS, None),
        (flips_a_bit, OPERATIONS, "gather_heads of .*: 1 of 30 elements differ"),
        (ignores_strides, OPERATIONS, "head chunk .*'fused', 'transposed', 'stepped'.* elements differ"),
        (
            remembers,
            TransportContract.test_decision_is_explained_and_assess_is_pure,
            "deciding twice gave .asked 1 times., then .asked",
        ),
        (leaves_early, TransportContract.test_small_gathers_and_barriers, "left the barrier early"),
    ],
    ids=["right", "flips a bit", "ignores strides", "remembers", "leaves early"],
)
def test_what_breaks_the_contract_fails_in_the_test_for_it(ranks, plugin, test, text):
    class Subject(TransportContract):
        transport = "wrong"
        dtypes = (torch.float32,)

    Subject.plugin = staticmethod(plugin)
    if text is None:
        test(Subject(), ranks, 2)
        return
    with pytest.raises(RankError, match=text):
        test(Subject(), ranks, 2)
