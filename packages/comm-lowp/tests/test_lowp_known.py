"""Calls with storage that was found good before: what is looked at again, and that nothing else gets through."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, _cuda
from comm_core.errors import ArgumentTypeError, ArgumentValueError, ClosedError, PeerStalledError, TransportError
from comm_core.group import thread_groups
from comm_core.plugins import register, unregister
from comm_core.plugins.discovery import registry
from comm_lowp import UlyssesQKV, qkv
from comm_lowp.known import KEPT, KnownCalls
from comm_lowp.plugin import LowpPlugin

BF16, F16 = torch.bfloat16, torch.float16
SHAPE = (1, 8, 2, 64)


def operands(number: int = 3) -> list[torch.Tensor]:
    return [torch.zeros(SHAPE, dtype=BF16) for _ in range(number)]


def nothing() -> None:
    pass


def test_storage_is_known_by_its_addresses_and_by_what_lies_there() -> None:
    calls, tensors = KnownCalls(), operands()
    assert calls.find(tensors) is None
    calls.keep(tensors, nothing)
    known = calls.find([x.view(SHAPE) for x in tensors])
    assert known is not None and known.launch is nothing
    q, k, v = tensors
    fresh = operands(1)[0]
    for other in (
        (fresh, k, v),
        (k, q, v),
        (q, k, v, fresh),
        (q, k),
        (q.view(1, 4, 4, 64), k, v),
        (q, k.as_strided(SHAPE, (1024, 64, 512, 1)), v),
        (q, k, v.view(F16)),
        (q, k, v[:, :4]),
        (torch.ops.aten._neg_view(q), k, v),
        (torch.nn.Parameter(q), k, v),
        (q, k, None),
        (q, k, "v"),
        (q, k, v.to("meta")),
    ):
        assert calls.find(other) is None, other
    assert calls.find(tensors) is known


def test_tensors_that_are_not_plain_are_never_known() -> None:
    calls, (q, k, v) = KnownCalls(), operands()
    for x in (torch.nn.Parameter(q), torch.ops.aten._neg_view(q)):
        calls.keep((x, k, v), nothing)
        assert calls.find((x, k, v)) is None and calls.find((q, k, v)) is None


def test_no_tensor_is_kept_and_not_more_than_a_few_calls() -> None:
    calls, tensors = KnownCalls(), operands(KEPT + 1)
    for x in tensors:
        calls.keep([x], None)
    assert len(calls._calls) == 1 and calls.find(tensors[-1:]) is not None and calls.find(tensors[:1]) is None
    gone = weakref.ref(tensors[-1])
    tensors.clear()
    del x
    gc.collect()
    assert gone() is None


# Through a communicator


class Recorder:
    """A pipeline that prepares calls, and counts how they are made."""

    name, orders_streams = "direct", True

    def __init__(self) -> None:
        self.full = self.launched = self.prepared = 0
        self.error: Exception | None = None
        self.buffers = (torch.zeros(4096, dtype=torch.uint8),)

    def __call__(self, *arguments: Any) -> None:
        self.full += 1

    def prepare(self, *arguments: Any) -> Callable[[], None]:
        self.prepared += 1
        return self.launch

    def launch(self) -> None:
        if self.error is not None:
            raise self.error
        self.launched += 1


class Place:
    """A communicator with a workspace whose pipeline is a `Recorder`, and storage that is known."""

    def __init__(self) -> None:
        self.comm = UlyssesCommunicator(thread_groups(1)[0], max_bytes=1 << 20, dtype=BF16, device="cpu")
        self.workspace = self.comm.prepare_qkv(SHAPE)
        self.q, self.k, self.v = operands()
        self.out: UlyssesQKV = self.comm.scatter_qkv(self.q, self.k, self.v, workspace=self.workspace)
        self.pipeline = self.workspace._pipeline = Recorder()
        self.call()
        assert (self.pipeline.full, self.pipeline.prepared, self.pipeline.launched) == (0, 1, 1)
        self.pipeline.launched = 0

    def call(self, **changes: Any) -> Any:
        given = {"q": self.q, "k": self.k, "v": self.v, "workspace": self.workspace, "out": self.out, **changes}
        return self.comm.scatter_qkv(given.pop("q"), given.pop("k"), given.pop("v"), **given)


@pytest.fixture
def place() -> Iterator[Place]:
    mine = "sage2" not in registry().codecs
    if mine:
        register("lowp-known", LowpPlugin())
    made = Place()
    yield made
    made.comm.close()
    if mine:
        unregister("lowp-known")


def test_the_second_call_with_the_same_storage_is_only_launched(place: Place) -> None:
    version, sent = place.out.q_scale._version, place.comm.bytes_sent
    assert place.call() is place.out
    # Other objects, the same storage.
    again = UlyssesQKV._make([*[x.view(x.shape) for x in place.out[:6]], *place.out[6:]])
    assert place.call(q=place.q.view(SHAPE), out=again) is again
    assert (place.pipeline.launched, place.pipeline.full, place.pipeline.prepared) == (2, 0, 1)
    assert place.out.q_scale._version == version + 2 and place.comm.bytes_sent == sent
    assert torch.is_grad_enabled()


def test_new_outputs_and_new_storage_take_the_full_way(place: Place) -> None:
    made = place.comm.scatter_qkv(place.q, place.k, place.v, workspace=place.workspace)
    assert made is not place.out and place.pipeline.full == 1
    place.call(v=operands(1)[0])
    assert (place.pipeline.full, place.pipeline.launched, place.pipeline.prepared) == (1, 1, 2)


def test_what_changed_since_is_refused_as_if_it_were_new(place: Place) -> None:
    out = place.out
    cases: list[tuple[dict[str, Any], str]] = [
        ({"q": place.q.view(1, 4, 4, 64)}, "q must be"),
        ({"k": place.k.view(F16)}, "k must be"),
        ({"v": torch.ops.aten._neg_view(place.v)}, "v"),
        ({"out": out._replace(q=out.q.view(1, 4, 4, 64))}, "out.q must be"),
        ({"out": out._replace(k=out.k.view(torch.uint8))}, "out.k must be"),
        ({"out": out._replace(v_scale=out.v_scale.as_strided(out.v_scale.shape, (128, 1, 2)))}, "contiguous"),
        ({"out": out._replace(used_sequence=5)}, "out.used_sequence must be"),
        ({"out": out._replace(layout="sage2_sm9")}, "out.layout must be"),
        ({"out": out._replace(k=out.q)}, "must not overlap"),
    ]
    for changes, text in cases:
        with pytest.raises(ArgumentValueError, match=text):
            place.call(**changes)
    with pytest.raises(RuntimeError, match="ambiguous"):
        place.call(out=out._replace(used_sequence=torch.ones(2)))
    with pytest.raises(ArgumentTypeError, match="out must be a UlyssesQKV, got tuple"):
        place.call(out=tuple(out))
    assert place.pipeline.launched == 0 and place.pipeline.full == 0
    # Changed in place, and back again.
    out.k_scale.unsqueeze_(0)
    with pytest.raises(ArgumentValueError, match=r"out\.k_scale must be"):
        place.call()
    out.k_scale.squeeze_(0)
    place.call()
    assert place.pipeline.launched == 1


def test_a_workspace_is_its_own_communicators_also_for_known_storage(place: Place) -> None:
    with (
        UlyssesCommunicator(thread_groups(1)[0], max_bytes=1 << 20, dtype=BF16, device="cpu") as other,
        pytest.raises(ArgumentValueError, match="belongs to another communicator"),
    ):
        other.scatter_qkv(place.q, place.k, place.v, workspace=place.workspace, out=place.out)
    assert place.pipeline.launched == 0


def test_a_stall_breaks_the_communicator_as_on_the_full_way(place: Place) -> None:
    place.pipeline.error = PeerStalledError("rank 1 did not come", 1, 0)
    version = place.out.q._version
    with pytest.raises(PeerStalledError, match="rank 1"):
        place.call()
    place.pipeline.error = None
    with pytest.raises(TransportError, match="broken since an earlier failure: rank 1 did not come"):
        place.call()
    assert place.out.q._version == version and place.pipeline.launched == 0
    place.comm.close()
    with pytest.raises(ClosedError):
        place.call()


def test_storage_is_ready_for_every_stream_once_it_is_prepared(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are cleared on the stream that prepares; a call on another one would find them half-way."""
    order: list[str] = []

    def make(*arguments: Any, **options: Any) -> Any:
        order.append("made")
        return place.pipeline

    monkeypatch.setattr(qkv, "make_pipeline", make)
    monkeypatch.setattr(_cuda, "synchronize", lambda device: order.append(f"waited for {device}"))
    place.comm.prepare_qkv(SHAPE)
    assert order == ["made", "waited for cpu"]
