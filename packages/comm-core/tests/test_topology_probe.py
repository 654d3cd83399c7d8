"""The probe over faked machines: identity by UUID, unknown instead of wrong, and never an exception."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch

from comm_core.testing.fake_nvml import (
    NOT_SUPPORTED,
    UNKNOWN,
    FakeFabric,
    FakeGpu,
    FakeMachine,
    FakeNvml,
    FakeTorch,
    installed,
)
from comm_core.testing.topologies import gpu_uuid
from comm_core.topology import predicates
from comm_core.topology.facts import FabricFacts, PairFacts, RankFacts
from comm_core.topology.probe import host_facts, numa_node, probe_machine, probe_rank


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("COMM_TOPOLOGY_FILE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def probe(machine: FakeMachine, index: int, *, rank: int = 0, visible: str | None = None, nvml=True) -> RankFacts:
    """Probe CUDA device `index` of a process with that mask."""
    binding = FakeNvml(machine) if nvml is True else nvml
    with installed(binding, FakeTorch(machine, visible=visible)):
        return probe_rank(rank, torch.device("cuda", index))


def probe_group(machine: FakeMachine, positions, *, masks=None) -> list[RankFacts]:
    """Probe one rank for each CUDA device of `positions`, or for device 0 under each of `masks`."""
    if masks is not None:
        return [probe(machine, 0, rank=rank, visible=mask) for rank, mask in enumerate(masks)]
    return [probe(machine, index, rank=rank) for rank, index in enumerate(positions)]


@pytest.fixture
def sysfs(tmp_path):
    """A sysfs tree with two GPUs on NUMA node 1 and one of which the system does not say."""
    for address, node in (("0000:10:00.0", "1"), ("0000:11:00.0", "1"), ("0000:12:00.0", "-1")):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node + "\n")
    return tmp_path


def test_everything_of_a_healthy_machine_is_known(sysfs):
    """A mesh gives complete facts, without a note, and closes NVML."""
    machine = FakeMachine.mesh(2)
    machine.change(0, fabric=FakeFabric(cluster_uuid=bytes(16)))
    nvml = FakeNvml(machine)
    with installed(nvml, FakeTorch(machine)):
        facts = probe_rank(3, torch.device("cuda", 0), sysfs=sysfs)
    assert (facts.rank, facts.error, facts.notes, facts.recorded) == (3, None, (), False)
    assert facts.device.kind == "cuda"
    assert (facts.device.index, facts.device.uuid, facts.device.pci_bus_id) == (0, gpu_uuid(0), "0000:10:00.0")
    assert (facts.device.numa_node, facts.device.mig, facts.device.nvlinks) == (1, False, 18)
    assert (facts.device.compute_capability, facts.device.memory_bytes) == ("9.0", 80 << 30)
    assert facts.device.fabric == FabricFacts("completed", 0, "0" * 32, 0)
    assert facts.peers == {gpu_uuid(1): PairFacts(True, True, True, True, True, "node")}
    assert {"torch", "cuda_runtime", "nccl", "nvidia_driver", "cuda_driver", "python", "comm_core"} <= {
        *facts.versions
    }
    assert facts.host == host_facts()
    assert nvml.open_users == 0
    assert RankFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_live_links_are_not_peers():
    """A1: bridged pairs only: the group of four is refused with a missing pair, the bridged pair is accepted."""
    machine = FakeMachine.islands(4, 2)
    four = probe_group(machine, range(4))
    assert all(facts.device.nvlinks == 18 for facts in four)
    verdict = predicates.assess_nvlink(four)
    assert not verdict.eligible
    assert "no NVLink between ranks 0→2, 0→3, 1→2" in verdict.reason
    assert predicates.assess_nvlink(probe_group(machine, [0, 1])).eligible


def test_a_mask_that_reorders_does_not_mislead():
    """A2: CUDA_VISIBLE_DEVICES=6,4 on a machine whose NVLink is among GPUs 4 to 7 only."""
    machine = FakeMachine.islands(8, 4)
    machine.nvlink = lambda i, j: i >= 4 and j >= 4
    for i in range(4):
        machine.change(i, links=0)
    facts = [probe(machine, index, rank=index, visible="6,4") for index in range(2)]
    assert [record.device.uuid for record in facts] == [gpu_uuid(6), gpu_uuid(4)]
    assert [record.device.nvlinks for record in facts] == [18, 18]
    assert facts[0].peers[gpu_uuid(4)].nvlink is True
    assert facts[0].peers[gpu_uuid(4)].peer_access is True
    assert facts[0].peers[gpu_uuid(0)].nvlink is False
    assert facts[0].peers[gpu_uuid(0)].peer_access is None
    assert predicates.assess_nvlink(facts).eligible
    assert not predicates.assess_nvlink([probe(machine, i, rank=i, visible="0,4") for i in range(2)]).eligible


@pytest.mark.parametrize("mask", [gpu_uuid(2), "GPU-00000002", "2"])
def test_every_spelling_of_a_mask_gives_the_same_facts(mask):
    """A3: ordinal, UUID and prefix of a UUID select one GPU; the facts do not depend on the spelling."""
    facts = probe(FakeMachine.mesh(4), 0, visible=mask)
    assert (facts.error, facts.device.uuid) == (None, gpu_uuid(2))
    assert facts.peers[gpu_uuid(3)].nvlink is True


@pytest.mark.parametrize("mask", ["", "-1,0", "GPU-0000000", "MIG-nonsense", "x"])
def test_masks_that_show_nothing_are_an_error_fact(mask):
    """A3: an empty or invalid mask leaves no device: the probe says so and does not raise."""
    facts = probe(FakeMachine.mesh(4), 0, visible=mask)
    assert facts.error is not None
    assert (facts.device.kind, facts.device.uuid) == ("cuda", "")
    assert facts.host.hostname
    assert not predicates.assess_nvlink([facts, probe(FakeMachine.mesh(4), 1, rank=1)]).eligible


def test_a_blank_entry_ends_the_mask():
    """A3: "0,,1" shows one device; the other GPUs are known to NVML, and not visible to CUDA."""
    facts = probe(FakeMachine.mesh(2), 0, visible="0,,1")
    assert facts.error is None
    assert facts.peers[gpu_uuid(1)].peer_access is None
    assert any("does not see 1 of" in note for note in facts.notes)


def test_what_the_mask_says_is_not_recorded(monkeypatch):
    """The mask may hold UUIDs: only that it is set is recorded, with NCCL's P2P variables as they are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-secret")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    facts = probe(FakeMachine.mesh(1), 0)
    assert facts.environment == {"NCCL_P2P_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "set"}


def test_orders_of_cuda_and_nvml_differ():
    """A4: CUDA lists [B, A], NVML [A, B], and neither is the order of the machine's description."""
    fast = FakeGpu("GPU-b", "00000000:20:00.0", name="fast", links=18, capability=(9, 0))
    slow = FakeGpu("GPU-a", "00000000:10:00.0", name="slow", links=0, capability=(8, 0))
    machine = FakeMachine([slow, fast], cuda_order=[1, 0], nvml_order=[0, 1])
    first, second = probe_group(machine, range(2))
    assert (first.device.uuid, first.device.name, first.device.nvlinks) == ("GPU-b", "fast", 18)
    assert (second.device.uuid, second.device.name, second.device.nvlinks) == ("GPU-a", "slow", 0)
    assert set(first.peers) == {"GPU-a"}


def test_without_nvml_only_cuda_s_facts_are_known():
    """A6: no binding or no library: peer access is known, NVLink and MIG are not, and NVLink is refused."""
    broken = FakeNvml(FakeMachine.mesh(2))
    broken.fail("nvmlInit", 12)
    for nvml, text in ((None, "nvidia-ml-py is not installed"), (broken, "Library Not Found")):
        facts = [probe(FakeMachine.mesh(2), rank, rank=rank, nvml=nvml) for rank in range(2)]
        assert facts[0].error is None
        assert facts[0].device.uuid == gpu_uuid(0)
        assert facts[0].device.mig is None
        assert facts[0].peers == {gpu_uuid(1): PairFacts(peer_access=True)}
        assert any(text in note for note in facts[0].notes)
        assert not predicates.assess_nvlink(facts).eligible


def test_one_unknown_pair_refuses_nvlink_and_nothing_else():
    """A6: a pair that NVML can't answer about is unknown, and unknown is not NVLink."""
    machine = FakeMachine.mesh(4)
    facts = []
    for rank in range(4):
        nvml = FakeNvml(machine)
        nvml.fail("nvmlDeviceGetP2PStatus", UNKNOWN, when=lambda a, b, index: (a.position, b.position) == (1, 3))
        facts.append(probe(machine, rank, rank=rank, nvml=nvml))
    verdict = predicates.assess_nvlink(facts)
    assert not verdict.eligible
    assert "1→3" in verdict.reason and "Unknown Error" in verdict.reason
    assert "0→1" not in verdict.reason
    assert predicates.assess_pcie(facts).eligible


def test_two_islands():
    """A8: all eight and a mixed four are refused, each island is accepted."""
    machine = FakeMachine.islands(8, 4)
    assert not predicates.assess_nvlink(probe_group(machine, range(8))).eligible
    assert not predicates.assess_nvlink(probe_group(machine, [0, 1, 4, 5])).eligible
    assert predicates.assess_nvlink(probe_group(machine, [0, 1, 2, 3])).eligible
    assert predicates.assess_nvlink(probe_group(machine, [7, 6, 5, 4])).eligible


def test_mig_slices_of_one_gpu():
    """A9: two slices with one PCI id are two devices without peers, with the slice's own memory, and refused."""
    machine = FakeMachine.of(2)
    machine.change(0, mig=True, slices=("MIG-aaaa-0001", "MIG-bbbb-0002"))
    facts = probe_group(machine, (), masks=["MIG-aaaa-0001", "MIG-bbbb"])
    assert [record.device.uuid for record in facts] == ["MIG-aaaa-0001", "MIG-bbbb-0002"]
    assert len({record.device.pci_bus_id for record in facts}) == 1
    assert [record.peers for record in facts] == [{}, {}]
    assert predicates.unique_devices(facts) is None
    for assess in (predicates.assess_nvlink, predicates.assess_pcie, predicates.assess_mnnvl):
        verdict = assess(facts)
        assert not verdict.eligible
        assert "MIG" in verdict.reason


def test_a_gpu_in_mig_mode_by_its_own_uuid_is_mig_too():
    """A9: an older CUDA reports the parent's UUID for a slice; NVML's MIG mode gives it away."""
    machine = FakeMachine.mesh(2)
    machine.change(0, mig=True)
    facts = probe(machine, 0)
    assert facts.device.uuid == gpu_uuid(0)
    assert facts.device.mig is True


def test_a_name_that_says_mig_is_believed():
    """A9: CUDA names a slice as such although NVML can't tell: the device is a slice, whatever its UUID is."""
    machine = FakeMachine.mesh(2)
    machine.change(0, name="NVIDIA H100 MIG 1g.10gb", mig=None)
    facts = probe(machine, 0)
    assert facts.device.mig is True
    assert any("MIG" in note for note in facts.notes)


def test_every_process_sees_only_its_own_gpu():
    """E7: one mask a rank, so that all are ordinal 0, is legal: identities differ; CUDA can't see the peers."""
    facts = probe_group(FakeMachine.mesh(2), (), masks=["0", "1"])
    assert [record.device.index for record in facts] == [0, 0]
    assert predicates.known_uuids(facts) is None
    assert predicates.unique_devices(facts) is None
    verdict = predicates.assess_nvlink(facts)
    assert not verdict.eligible
    assert "CUDA_VISIBLE_DEVICES" in verdict.reason


def test_no_rank_chose_its_device():
    """E7: everybody on cuda:0 by accident: the reason names the ranks, the GPU and the fix."""
    reason = predicates.assess_nvlink(probe_group(FakeMachine.mesh(2), [0, 0])).reason
    assert "ranks 0, 1" in reason and gpu_uuid(0) in reason and "torch.cuda.set_device(local_rank)" in reason


def test_a_torch_without_uuid_has_no_identity():
    """Without .uuid the device stays unknown, although NVML could name a GPU at its address; a note says why."""
    machine = FakeMachine.mesh(2)
    with installed(FakeNvml(machine), FakeTorch(machine, has_uuid=False)):
        facts = [probe_rank(rank, torch.device("cuda", rank)) for rank in range(2)]
    assert facts[0].device.uuid == ""
    assert facts[0].device.nvlinks == 18
    assert any("get_device_properties(...).uuid" in note for note in facts[0].notes)
    assert "get_device_properties(...).uuid" in predicates.assess_nvlink(facts).reason


@pytest.mark.parametrize("call", ["device_count", "get_device_properties"])
def test_cuda_that_fails_is_an_error_fact(call):
    """A probe must not raise: the failure is one line, and what was found before it is kept."""
    fake = FakeTorch(FakeMachine.mesh(2))
    fake.fail(call, RuntimeError("CUDA driver version is insufficient\nmany\nlines of advice"))
    with installed(FakeNvml(FakeMachine.mesh(2)), fake):
        facts = probe_rank(1, torch.device("cuda", 1))
    assert facts.error == "RuntimeError: CUDA driver version is insufficient"
    assert (facts.rank, facts.device.index) == (1, 1)
    assert facts.host.boot_id


def test_a_pair_that_cuda_can_not_answer_about_has_an_error():
    """One failing peer query leaves that peer unknown, with its error beside NVML's facts."""
    fake = FakeTorch(FakeMachine.mesh(2))
    fake.fail("can_device_access_peer", RuntimeError("invalid device"))
    with installed(FakeNvml(FakeMachine.mesh(2)), fake):
        facts = probe_rank(0, torch.device("cuda", 0))
    pair = facts.peers[gpu_uuid(1)]
    assert (pair.peer_access, pair.nvlink) == (None, True)
    assert pair.error == "peer_access: RuntimeError: invalid device"


@pytest.mark.parametrize("device", [None, "cuda:0", 3])
def test_a_wrong_argument_is_an_error_fact_too(device):
    """ "Never raises" has no exceptions, not even for a caller's mistake."""
    facts = probe_rank(0, device)
    assert facts.error is not None


def test_remote_gpus_are_not_looked_up_locally():
    """C10: a second host with fewer GPUs: each rank knows its own host's devices, whatever the ordinals are."""
    big, small = FakeMachine.mesh(4), FakeMachine([FakeGpu(gpu_uuid(0, host=1))])
    facts = [*probe_group(big, range(4)), probe(small, 0, rank=4)]
    assert facts[4].peers == {}
    assert gpu_uuid(0, host=1) not in facts[0].peers


def test_numa_nodes_come_from_sysfs(sysfs):
    """-1, which virtual machines say, and a missing file are unknown."""
    assert numa_node("0000:10:00.0", sysfs) == 1
    assert numa_node("0000:12:00.0", sysfs) is None
    assert numa_node("0000:99:00.0", sysfs) is None
    assert numa_node("", sysfs) is None
    (sysfs / "bus/pci/devices/0000:10:00.0/numa_node").write_text("garbage")
    assert numa_node("0000:10:00.0", sysfs) is None


def test_host_facts_of_a_fixture(tmp_path):
    """Boot id and namespaces come from procfs; what is missing is empty."""
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("b007-1d\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[42]")
    facts = host_facts(tmp_path)
    assert (facts.boot_id, facts.pid_namespace, facts.ipc_namespace) == ("b007-1d", "pid:[42]", "")
    assert facts.uid == os.getuid()


def test_host_facts_of_this_machine():
    """On a real Linux all of them are there."""
    facts = host_facts()
    assert len(facts.boot_id) == 36
    assert facts.pid_namespace.startswith("pid:[")
    assert facts.network_namespace.startswith("net:[")


def test_namespaces_are_told_apart():
    """C10, V16: a process in new PID and UTS namespaces has another namespace and host name, and the same boot."""
    code = (
        "from comm_core.topology.probe import host_facts; import json, dataclasses; "
        "print(json.dumps(dataclasses.asdict(host_facts())))"
    )
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine")
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--uts"]
    shell = f"hostname another; exec {shlex.quote(sys.executable)} -c '{code}'"
    result = subprocess.run(
        [*unshare, "sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False, env=_environment()
    )
    if result.returncode != 0 and "unshare" in result.stderr:
        pytest.skip(f"this kernel lets nobody make namespaces: {result.stderr.strip()}")
    inside, outside = json.loads(result.stdout), host_facts()
    assert inside["boot_id"] == outside.boot_id
    assert inside["hostname"] == "another"
    assert inside["pid_namespace"] not in ("", outside.pid_namespace)
    assert inside["ipc_namespace"] == outside.ipc_namespace


def test_the_machine_without_touching_cuda(sysfs):
    """One record a GPU through NVML alone, in NVML's order; peer access is inferred and says so."""
    machine = FakeMachine.islands(4, 2)
    machine.access = lambda i, j: i // 2 == j // 2
    machine.nvml_order = [3, 2, 1, 0]
    fake = FakeTorch(machine)
    nvml = FakeNvml(machine)
    with installed(nvml, fake):
        facts = probe_machine(sysfs=sysfs)
    assert not fake.initialized
    assert nvml.open_users == 0
    assert [record.device.uuid for record in facts] == [gpu_uuid(i) for i in (3, 2, 1, 0)]
    assert [record.rank for record in facts] == [0, 1, 2, 3]
    assert facts[3].device.numa_node == 1
    assert (facts[0].device.index, facts[0].device.name, facts[0].device.memory_bytes) == (-1, "Fake GPU", 80 << 30)
    assert facts[0].peers[gpu_uuid(2)].peer_access is True
    assert facts[0].peers[gpu_uuid(0)].peer_access is False
    assert all("inferred from NVML" in record.notes[-1] for record in facts)
    assert facts[0].versions["nvidia_driver"] == "580.0"
    assert "nccl" not in facts[0].versions
    assert predicates.assess_nvlink(facts[:2]).eligible


def test_a_pair_nvml_can_not_answer_about_is_not_inferred():
    """Inference needs both answers; an unknown one leaves peer access unknown."""
    nvml = FakeNvml(FakeMachine.mesh(2))
    nvml.fail("nvmlDeviceGetP2PStatus", NOT_SUPPORTED, when=lambda a, b, index: index == 1 and a.position == 0)
    with installed(nvml):
        first, second = probe_machine()
    assert first.peers[gpu_uuid(1)].peer_access is None
    assert second.peers[gpu_uuid(0)].peer_access is True


def test_a_machine_without_gpus_is_one_cpu_record():
    """V18: no library, no driver or no GPU: one record of a CPU, with the reason as a note."""
    with installed(None):
        (facts,) = probe_machine()
    assert (facts.rank, facts.error, facts.device.kind) == (0, None, "cpu")
    assert any("nvidia-ml-py" in note for note in facts.notes)
    with installed(FakeNvml(FakeMachine([]))):
        (facts,) = probe_machine()
    assert facts.device.kind == "cpu"


def _environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COMM_")}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}


MODULES = [
    "comm_core",
    "comm_core._nvml",
    "comm_core._cuda",
    "comm_core.topology",
    "comm_core.topology.facts",
    "comm_core.topology.predicates",
    "comm_core.topology.probe",
    "comm_core.topology.recorded",
    "comm_core.topology.ulysses",
    "comm_core.testing.fake_nvml",
    "comm_core.testing.topologies",
]


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=_environment(),
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_touches_nothing():
    """L13: each module imports with torch, pynvml and libcuda out of reach, and leaves them unimported."""
    run_python(
        f"""
        import importlib, sys
        for name in ("torch", "pynvml"):
            sys.modules[name] = None  # importing it raises ImportError
        for name in {MODULES!r}:
            importlib.import_module(name)
        """
    )


def test_probing_a_cpu_rank_touches_neither_cuda_nor_nvml():
    """L13: not only is torch.cuda uninitialized afterwards: nothing that could initialize or count was called."""
    out = run_python(
        """
        import torch
        from comm_core import _nvml
        from comm_core.topology.probe import probe_rank
        from comm_core.topology.ulysses import probe_ulysses_rank_topology

        touched = []
        def refuse(name):
            def called(*arguments, **options):
                touched.append(name)
                raise AssertionError(name)
            return called

        for name in ("_lazy_init", "is_available", "device_count", "current_device", "get_device_properties"):
            setattr(torch.cuda, name, refuse(name))
        _nvml.source = refuse("pynvml")
        facts = probe_rank(2, torch.device("cpu"))
        assert facts.error is None, facts.error
        assert facts.device.kind == "cpu" and facts.rank == 2 and facts.host.boot_id
        record = probe_ulysses_rank_topology("cpu", 2)
        assert record.probe_error is None, record.probe_error
        assert not touched, touched
        assert not torch.cuda.is_initialized()
        print("done")
        """
    )
    assert out == "done\n"


def test_probing_the_machine_imports_no_torch():
    """L13: `commctl topo` asks NVML and nobody else."""
    out = run_python(
        """
        import sys
        sys.modules["torch"] = None
        from comm_core.topology.probe import probe_machine
        print(len(probe_machine()))
        """
    )
    assert int(out) >= 1
