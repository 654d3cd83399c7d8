"""The torch.cuda wrapper: device arguments, and what may be asked without a GPU."""

from __future__ import annotations

import pytest
import torch

from comm_core import _cuda
from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.testing.fake_nvml import FakeMachine, FakeTorch, installed


@pytest.fixture
def four_gpus():
    """A process that sees four CUDA devices and has chosen the third."""
    fake = FakeTorch(FakeMachine.of(4), current=2)
    with installed(torch=fake):
        yield fake


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cuda:1", "cuda:1"),
        ("cuda:0003", "cuda:3"),
        (3, "cuda:3"),
        (0, "cuda:0"),
        (torch.device("cuda", 1), "cuda:1"),
        ("cuda", "cuda:2"),
        (torch.device("cuda"), "cuda:2"),
        (None, "cuda:2"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (torch.device("cpu", 0), "cpu"),
    ],
)
def test_devices_become_explicit(four_gpus, device, expected):
    """Every accepted spelling ends as one: an explicit ordinal, or plain cpu."""
    normal = _cuda.normalize_device(device)
    assert normal == torch.device(expected)
    assert normal.index == torch.device(expected).index


@pytest.mark.parametrize(
    "device", ["cuda:4", 4, "cuda:256", 256, -1, torch.device("cuda", 5), torch.device("cuda:128")]
)
def test_ordinals_out_of_range_name_the_count(four_gpus, device):
    """An ordinal that this process does not have is refused as it was written, before torch wraps it."""
    with pytest.raises(ArgumentValueError, match=r"sees 4 CUDA devices \(0 to 3\)"):
        _cuda.normalize_device(device)


@pytest.mark.parametrize("device", [True, False, 1.0, [0], b"cuda:0", object()])
def test_wrong_types_are_type_errors(four_gpus, device):
    """A bool is no ordinal; the type is named."""
    with pytest.raises(ArgumentTypeError, match=type(device).__name__):
        _cuda.normalize_device(device)


@pytest.mark.parametrize(
    "device",
    ["", "gpu", "cuda:", "cuda:-1", "cuda:1x", " cuda:1", "CUDA:1", "cuda:\u0661", "meta", "mps:0", "cpu:1", "xpu"],
)
def test_text_that_is_no_device_is_refused(four_gpus, device):
    """Other device types, garbage and digits of other scripts are errors that show the text."""
    with pytest.raises(ArgumentValueError, match="device") as caught:
        _cuda.normalize_device(device)
    assert repr(device) in str(caught.value)


def test_other_device_types_are_refused(four_gpus):
    """A torch.device of another type is refused by value."""
    with pytest.raises(ArgumentValueError, match="meta"):
        _cuda.normalize_device(torch.device("meta"))


def test_the_default_is_used_for_none_only(four_gpus):
    """`default` stands in for None and is normalized like any other device."""
    assert _cuda.normalize_device(None, torch.device("cpu")) == torch.device("cpu")
    assert _cuda.normalize_device(None, torch.device("cuda")) == torch.device("cuda", 2)
    assert _cuda.normalize_device(1, torch.device("cpu")) == torch.device("cuda", 1)


def test_without_cuda():
    """Without a CUDA device None is the CPU, and any CUDA device is refused without initializing anything."""
    fake = FakeTorch(FakeMachine([]))
    with installed(torch=fake):
        assert _cuda.normalize_device(None) == torch.device("cpu")
        for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
            with pytest.raises(ArgumentValueError, match="sees no CUDA device"):
                _cuda.normalize_device(device)
    assert not fake.initialized


def test_counting_does_not_initialize():
    """L13: the count and an explicit ordinal need no initialized CUDA."""
    fake = FakeTorch(FakeMachine.of(2))
    with installed(torch=fake):
        assert _cuda.device_count() == 2
        assert _cuda.normalize_device("cuda:1").index == 1
        assert not _cuda.is_initialized()
        assert not _cuda.is_capturing()
        assert _cuda.runtime_version() == "13.0"
        assert _cuda.nccl_version() == "2.28.9"
    assert not fake.initialized


def test_capture_is_asked_of_the_stream():
    """Capture is reported once CUDA is initialized, and never before."""
    fake = FakeTorch(FakeMachine.of(1), capturing=True)
    with installed(torch=fake):
        assert not _cuda.is_capturing()
        _cuda.current_device()
        assert _cuda.is_capturing()


def test_properties_name_the_missing_attribute():
    """A torch without .uuid can't identify a GPU; the note names the attribute."""
    with installed(torch=FakeTorch(FakeMachine.of(1), has_uuid=False)):
        properties = _cuda.device_properties(0)
    assert properties.uuid == ""
    assert "get_device_properties(...).uuid" in properties.note


def test_properties_of_a_gpu_and_of_a_slice():
    """UUIDs get a prefix and addresses sysfs's spelling; a slice is recognized by its name."""
    machine = FakeMachine.of(2)
    machine.change(1, mig=True, slices=("MIG-aaaa",))
    with installed(torch=FakeTorch(machine)):
        whole, part = _cuda.device_properties(0), _cuda.device_properties(1)
    assert (whole.uuid, whole.pci_bus_id, whole.compute_capability) == (machine.gpus[0].uuid, "0000:10:00.0", "9.0")
    assert part.uuid == "MIG-aaaa"


def test_the_guard_selects_and_restores(four_gpus):
    """The guard makes a CUDA device current for a block, and ignores a CPU."""
    with _cuda.device_guard(torch.device("cuda", 1)):
        assert _cuda.current_device() == 1
    assert _cuda.current_device() == 2
    with _cuda.device_guard(torch.device("cpu")):
        assert _cuda.current_device() == 2


def test_a_guard_is_needed_on_another_device_only(four_gpus):
    """A call on the current device, or on a CPU (-1), goes without."""
    assert [_cuda.is_current(index) for index in (-1, 0, 1, 2)] == [True, False, False, True]
    with _cuda.device_guard(torch.device("cuda", 1)):
        assert [_cuda.is_current(index) for index in (-1, 1, 2)] == [True, True, False]


def test_the_installed_torch_can_be_asked():
    """V18: the real torch answers, with CUDA or without, and capture is false outside of one."""
    assert _cuda.device_count() >= 0
    assert _cuda.is_capturing() is False
    assert (_cuda.runtime_version() is None) == (torch.version.cuda is None)
    version = _cuda.nccl_version()
    assert version is None or version[0].isdigit()
