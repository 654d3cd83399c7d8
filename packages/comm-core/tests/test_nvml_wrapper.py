"""The NVML wrapper over a faked binding: every fault of the binding or the driver ends as "unknown" with a note."""

from __future__ import annotations

import ctypes
import itertools
from contextlib import contextmanager

import pytest

from comm_core import _nvml
from comm_core.testing.fake_nvml import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    FakeFabric,
    FakeMachine,
    FakeNvml,
    NVMLError,
    installed,
)
from comm_core.topology.facts import FabricFacts


@contextmanager
def opened(nvml: FakeNvml):
    """Open the wrapper's session over `nvml`."""
    with installed(nvml), _nvml.session() as session:
        yield session


def test_a_session_closes_exactly_what_it_opened():
    """Nested sessions and a session inside a user's own NVML leave the count as it was."""
    nvml = FakeNvml(FakeMachine.mesh(2))
    nvml.nvmlInit()
    with opened(nvml) as outer:
        with _nvml.session() as inner:
            assert inner.driver_version() == "580.0"
        assert nvml.open_users == 2
        assert outer.driver_version() == "580.0"
    assert nvml.open_users == 1
    assert nvml.nvmlDeviceGetCount() == 2


def test_an_exception_in_the_block_passes_and_nvml_is_closed():
    """The caller's own failure is not swallowed and does not leak an initialization."""
    nvml = FakeNvml(FakeMachine.mesh(1))
    with pytest.raises(KeyError), opened(nvml):
        raise KeyError("mine")
    assert nvml.open_users == 0


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, NO_PERMISSION, UNKNOWN, 4711])
def test_nvml_that_can_not_be_opened_answers_unknown(code):
    """A6: a failing nvmlInit, whatever its code, makes every answer unknown and is not shut down."""
    nvml = FakeNvml(FakeMachine.mesh(2))
    nvml.fail("nvmlInit", code)
    with opened(nvml) as session:
        assert not session.available
        assert str(NVMLError(code)) in session.reason
        assert session.driver_version() is None
        assert session.devices() == []
        assert session.find("GPU-1") is None
    assert nvml.shutdowns == 0


def test_a_missing_binding_names_the_package():
    """A6: without nvidia-ml-py the reason says what to install."""
    with installed(None), _nvml.session() as session:
        assert not session.available
        assert "nvidia-ml-py" in session.reason


def test_a_failed_opening_is_not_remembered():
    """A6: one failure must not poison later use."""
    nvml = FakeNvml(FakeMachine.mesh(1))
    answers = iter([True, False])
    nvml.fail("nvmlInit", DRIVER_NOT_LOADED, when=lambda: next(answers))
    with installed(nvml):
        with _nvml.session() as first:
            assert not first.available
        with _nvml.session() as second:
            assert second.available
            assert len(second.devices()) == 1


def test_a_failing_shutdown_is_silent():
    """Closing happens after the facts were found: it must not throw them away."""
    nvml = FakeNvml(FakeMachine.mesh(1))
    nvml.fail("nvmlShutdown", UNKNOWN)
    with opened(nvml) as session:
        assert session.available


@pytest.mark.parametrize(("declared", "links"), [(18, 18), (36, 18), (18, 36), (36, 0), (36, 12)])
def test_links_are_counted_to_the_driver_s_last(declared, links):
    """A5: the binding's bound may be above or below the GPU's real number of links."""
    machine = FakeMachine.of(1)
    machine.change(0, links=links)
    with opened(FakeNvml(machine, max_links=declared)) as nvml:
        assert nvml.nvlinks(nvml.devices()[0]) == links
        assert nvml.notes == []


@pytest.mark.parametrize("code", [INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, GPU_IS_LOST, UNKNOWN])
def test_any_error_ends_the_link_loop_and_keeps_the_count(code):
    """A5: whatever error the first link that does not exist raises, what was counted before it stands."""
    nvml = FakeNvml(FakeMachine.of(1))
    nvml.fail("nvmlDeviceGetNvLinkState", code, when=lambda handle, link: link >= 5)
    with opened(nvml) as session:
        assert session.nvlinks(session.devices()[0]) == 5


def test_the_first_link_tells_none_from_unknown():
    """A5: "not supported" at link 0 is a GPU without NVLink, any other error there says nothing."""
    nvml = FakeNvml(FakeMachine.of(1))
    nvml.fail("nvmlDeviceGetNvLinkState", NO_PERMISSION)
    with opened(nvml) as session:
        assert session.nvlinks(session.devices()[0]) is None
        assert any("Insufficient Permissions" in note for note in session.notes)


def test_pair_status_of_a_mesh_and_of_islands():
    """A1: connectivity is a fact of the ordered pair, not of links that are up."""
    with opened(FakeNvml(FakeMachine.islands(4, 2))) as nvml:
        devices = nvml.devices()
        near, far = nvml.pair(devices[0], devices[1]), nvml.pair(devices[1], devices[2])
        assert (near.nvlink, near.p2p_read, near.p2p_write, near.p2p_atomics, near.error) == (True,) * 4 + (None,)
        assert (far.nvlink, far.p2p_read, far.p2p_write, far.p2p_atomics, far.error) == (
            False,
            True,
            True,
            False,
            None,
        )
        assert (near.common_ancestor, far.common_ancestor) == ("node", "system")
        assert near.peer_access is None


@pytest.mark.parametrize("code", [NOT_SUPPORTED, UNKNOWN, NO_PERMISSION, FUNCTION_NOT_FOUND])
def test_a_failing_pair_query_is_unknown_for_that_pair_only(code):
    """A6: one ordered pair whose status can't be had is unknown with an error; its reverse and the rest stand."""
    nvml = FakeNvml(FakeMachine.mesh(3))
    nvml.fail(
        "nvmlDeviceGetP2PStatus",
        code,
        when=lambda a, b, index: (a.position, b.position, index) == (0, 1, 2),
    )
    with opened(nvml) as session:
        devices = session.devices()
        bad = session.pair(devices[0], devices[1])
        assert bad.nvlink is None
        assert bad.p2p_write is True
        assert "nvlink" in (bad.error or "") and str(NVMLError(code)) in (bad.error or "")
        for a, b in itertools.permutations(devices, 2):
            if (a, b) != (devices[0], devices[1]):
                assert session.pair(a, b).nvlink is True
                assert session.pair(a, b).error is None


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False), (5, False), (6, None), (77, None)])
def test_status_numbers(status, expected):
    """A6: "unknown" and numbers from the future are unknown, never yes or no."""

    class Numbers(FakeNvml):
        def nvmlDeviceGetP2PStatus(self, handle, peer, index):
            return status

    with opened(Numbers(FakeMachine.mesh(2))) as nvml:
        a, b = nvml.devices()
        pair = nvml.pair(a, b)
        assert (pair.nvlink, pair.p2p_read) == (expected, expected)
        assert (pair.error is None) == (expected is not None)


def test_what_decides_nothing_is_no_pair_error():
    """A6: a virtual machine that can't answer about atomics and common ancestors still has NVLink."""
    nvml = FakeNvml(FakeMachine.mesh(2))
    nvml.fail("nvmlDeviceGetP2PStatus", NOT_SUPPORTED, when=lambda a, b, index: index == 3)
    nvml.fail("nvmlDeviceGetTopologyCommonAncestor", NOT_SUPPORTED)
    with opened(nvml) as session:
        a, b = session.devices()
        pair = session.pair(a, b)
        assert (pair.nvlink, pair.p2p_atomics, pair.common_ancestor, pair.error) == (True, None, None, None)


UUIDS = {
    "zero": bytes(16),
    "leading zero": bytes([0, *range(0x11, 0x20)]),
    "text": b"0123456789abcdef",
    "last byte": bytes(15) + b"\x01",
}


@pytest.mark.parametrize("declared", [36, 100])
@pytest.mark.parametrize("uuid", UUIDS.values(), ids=UUIDS.keys())
def test_fabric_is_read_in_the_driver_s_layout(declared, uuid):
    """A13, I1: both generations of the binding, a leading zero byte, and padding behind the one-byte state."""
    machine = FakeMachine.of(1)
    machine.change(0, fabric=FakeFabric(state=3, status=0, cluster_uuid=uuid, clique_id=9))
    with opened(FakeNvml(machine, fabric_bytes=declared)) as nvml:
        assert nvml.fabric(nvml.devices()[0]) == FabricFacts("completed", 0, uuid.hex(), 9)
        assert nvml.notes == []


@pytest.mark.parametrize("known", [{2}, {2, 3}, {3}, {2, 3, 4}, {4}], ids=str)
@pytest.mark.parametrize("uuid", UUIDS.values(), ids=UUIDS)
def test_every_generation_of_the_fabric_structure_is_read(known, uuid):
    """A13, I1: the newest that the driver knows, whichever those are; raw 16 bytes in all of them."""
    machine = FakeMachine.of(1)
    machine.change(0, fabric=FakeFabric(cluster_uuid=uuid, clique_id=9))
    nvml = FakeNvml(machine, fabric_versions=frozenset(known))
    with opened(nvml) as session:
        assert session.fabric(session.devices()[0]) == FabricFacts("completed", 0, uuid.hex(), 9)
        assert session.notes == []
    asked = [call for call in nvml.calls if "Fabric" in call]
    assert len(asked) == {2: 3, 3: 2, 4: 1}[max(known)]


@pytest.mark.parametrize(
    ("cliques", "expected"),
    [
        (((0, 5),), 5),
        (((0, 5), (1, 6), (2, 7)), 5),
        (((1, 6), (2, 7)), None),
        ((), None),
        (tuple((3, number) for number in range(64)), None),
    ],
    ids=["pointers", "several kinds", "no pointers", "none", "full"],
)
def test_the_clique_of_plain_pointers_counts(cliques, expected):
    """I8: one of multicast or of another way of reaching peers says nothing about loads and stores."""
    machine = FakeMachine.of(1)
    uuid = UUIDS["leading zero"]
    machine.change(0, fabric=FakeFabric(cluster_uuid=uuid, cliques=cliques))
    with opened(FakeNvml(machine, fabric_versions=frozenset({4}))) as session:
        assert session.fabric(session.devices()[0]) == FabricFacts("completed", 0, uuid.hex(), expected)


def test_a_binding_without_the_newest_function_is_asked_for_the_older_one():
    """A13: an old binding over a new driver."""

    class Old(FakeNvml):
        @property
        def nvmlDeviceGetGpuFabricInfo_v4(self):  # type: ignore[override]
            raise AttributeError("module 'pynvml' has no attribute 'nvmlDeviceGetGpuFabricInfo_v4'")

    machine = FakeMachine.of(1)
    machine.change(0, fabric=FakeFabric(cluster_uuid=UUIDS["leading zero"], clique_id=9))
    with opened(Old(machine, fabric_versions=frozenset({2, 3, 4}))) as session:
        assert session.fabric(session.devices()[0]).clique_id == 9
        assert session.notes == []


def test_the_faked_old_binding_really_is_wrong():
    """A13: guards the tests above: reading through the 100-byte structure finds neither UUID nor state."""
    machine = FakeMachine.of(1)
    machine.change(0, fabric=FakeFabric(cluster_uuid=UUIDS["leading zero"], clique_id=9))
    nvml = FakeNvml(machine, fabric_bytes=100)
    nvml.nvmlInit()
    info = nvml.c_nvmlGpuFabricInfoV_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(nvml.nvmlDeviceGetHandleByIndex(0), ctypes.byref(info))
    assert (info.clusterUuid, info.cliqueId, info.state) == (b"", 0, 0)


@pytest.mark.parametrize(
    ("fabric", "expected"),
    [
        (None, FabricFacts("not_supported")),
        (FakeFabric(state=0), FabricFacts("not_supported")),
        (FakeFabric(state=1), FabricFacts("not_started")),
        (FakeFabric(state=2, status=3), FabricFacts("in_progress")),
        (FakeFabric(state=3, status=999), FabricFacts("completed", 999, "0" * 32, 0)),
        (FakeFabric(state=9), FabricFacts("unknown")),
    ],
)
def test_fabric_states(fabric, expected):
    """I1: status, UUID and clique count only for a registration that has finished."""
    machine = FakeMachine.of(1)
    machine.change(0, fabric=fabric)
    with opened(FakeNvml(machine)) as nvml:
        assert nvml.fabric(nvml.devices()[0]) == expected


def test_fabric_without_the_function_is_unknown():
    """A13: an old driver or binding has no such call."""
    nvml = FakeNvml(FakeMachine.of(1))
    nvml.fail("nvmlDeviceGetGpuFabricInfoV", FUNCTION_NOT_FOUND)
    with opened(nvml) as session:
        assert session.fabric(session.devices()[0]) == FabricFacts()
        assert any("Function Not Found" in note for note in session.notes)


def test_a_device_is_found_by_uuid_then_by_pci_id():
    """A2: never by a position; a UUID without the right prefix and an address in CUDA's spelling will do."""
    machine = FakeMachine.of(3)
    machine.nvml_order = [2, 0, 1]
    with opened(FakeNvml(machine)) as nvml:
        wanted = machine.gpus[1]
        for found in (
            nvml.find(wanted.uuid),
            nvml.find(wanted.uuid[4:]),
            nvml.find("", "0000:11:00.0"),
            nvml.find(wanted.uuid, "0000:10:00.0"),
        ):
            assert found is not None
            assert (found.uuid, found.pci_bus_id) == (wanted.uuid, "0000:11:00.0")
        assert nvml.find("GPU-00000000-dead-0000-0000-000000000000", "0000:11:00.0") is None
        assert nvml.find("") is None
        assert len(nvml.notes) == 2


def test_mig_slices_are_found_and_have_their_parent_s_address():
    """A9: CUDA's UUID of a slice has no prefix; NVML tells what it is."""
    machine = FakeMachine.of(2)
    machine.change(1, mig=True, slices=("MIG-aaaa", "MIG-bbbb"))
    with opened(FakeNvml(machine)) as nvml:
        for spelling in ("MIG-bbbb", "GPU-bbbb", "bbbb"):
            found = nvml.find(spelling)
            assert found is not None
            assert (found.uuid, found.mig_slice, found.pci_bus_id) == ("MIG-bbbb", True, "0000:11:00.0")
            assert nvml.mig(found) is True
        whole = nvml.find(machine.gpus[1].uuid)
        assert whole is not None
        assert nvml.mig(whole) is True
        other = nvml.find(machine.gpus[0].uuid)
        assert other is not None
        assert nvml.mig(other) is False


@pytest.mark.parametrize(("code", "expected"), [(NOT_SUPPORTED, False), (NO_PERMISSION, None), (UNKNOWN, None)])
def test_mig_mode_that_can_not_be_queried(code, expected):
    """A6, A9: "not supported" means a GPU without MIG; any other failure means unknown."""
    nvml = FakeNvml(FakeMachine.of(1))
    nvml.fail("nvmlDeviceGetMigMode", code)
    with opened(nvml) as session:
        assert session.mig(session.devices()[0]) is expected


def test_one_lost_gpu_does_not_hide_the_others():
    """A6: a GPU that has fallen off the bus is left out, with a note."""
    nvml = FakeNvml(FakeMachine.mesh(3))
    nvml.fail("nvmlDeviceGetHandleByIndex", GPU_IS_LOST, when=lambda index: index == 1)
    with opened(nvml) as session:
        assert [device.pci_bus_id for device in session.devices()] == ["0000:10:00.0", "0000:12:00.0"]
        assert any("GPU is lost" in note for note in session.notes)


def test_errors_that_are_not_nvml_s_are_unknown_too():
    """A6: a binding without a function, text that does not decode, bytes where newer bindings give text."""

    class Odd(FakeNvml):
        nvmlSystemGetDriverVersion = None  # type: ignore[assignment]

        def nvmlDeviceGetName(self, handle):
            return b"NVIDIA H200"

        def nvmlDeviceGetMemoryInfo(self, handle):
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    with opened(Odd(FakeMachine.of(1))) as nvml:
        device = nvml.devices()[0]
        assert nvml.driver_version() is None
        assert nvml.name(device) == "NVIDIA H200"
        assert nvml.memory_bytes(device) is None
        assert len(nvml.notes) == 2


def test_numbers_agree_with_the_installed_binding():
    """The wrapper spells out NVML's numbers; where nvidia-ml-py is installed they must be the same."""
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.NVML_ERROR_NOT_SUPPORTED == NOT_SUPPORTED
    assert (pynvml.NVML_P2P_CAPS_INDEX_WRITE, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == (1, 2)
    assert pynvml.NVML_P2P_CAPS_INDEX_ATOMICS == 3
    assert (pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_P2P_STATUS_UNKNOWN) == (0, 6)
    tags = [info.version for info, name in _nvml._fabric_questions() if name == "nvmlDeviceGetGpuFabricInfoV"]
    assert tags == [0x03000028, 0x02000024]
    assert pynvml.nvmlGpuFabricInfo_v2 == tags[1]
    assert getattr(pynvml, "nvmlGpuFabricInfo_v3", tags[0]) == tags[0]
    newest = getattr(pynvml, "c_nvmlGpuFabricInfo_v4_t", _nvml._FabricInfo4)
    assert ctypes.sizeof(newest) == ctypes.sizeof(_nvml._FabricInfo4) == 548
    assert getattr(pynvml, "NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER", 0) == _nvml._UNICAST_POINTER
    for number, name in _nvml._ANCESTORS.items():
        assert getattr(pynvml, f"NVML_TOPOLOGY_{name.upper()}") == number
    for number, name in _nvml._FABRIC_STATES.items():
        assert getattr(pynvml, f"NVML_GPU_FABRIC_STATE_{name.upper()}") == number


def test_the_real_binding_never_raises():
    """V18: with the real package, on a machine with or without a driver, a session opens or says why not."""
    with _nvml.session() as nvml:
        devices = nvml.devices()
        assert nvml.available or nvml.reason
        assert devices == [] or nvml.available
        for device in devices:
            assert device.uuid.startswith("GPU-")
