"""The all-reduce backend ``"trtllm"``: Lamport kernels over NVLink, between the GPUs of one host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from comm_core.allreduce.kernel_backend import WindowAllReduce
from comm_core.allreduce.module import reduce_module
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Request, Verdict
from comm_nvlink._version import __version__

if TYPE_CHECKING:
    from comm_nvlink.allreduce_workspace import TRTLLMAllReduceFusionWorkspace

__all__ = ["ALLREDUCE", "TrtllmAllReduce"]

ALLREDUCE = reduce_module("comm_nvlink")
"""Twin: csrc/allreduce.cu."""


class TrtllmAllReduce(WindowAllReduce):
    """All-reduce and what follows it over NVLink, in memory of CUDA IPC or VMM handles."""

    name = "trtllm"
    version = __version__
    wire = 1
    priority = 100
    module = ALLREDUCE

    def admit(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `WindowAllReduce.admit`."""
        return predicates.assess_nvlink(facts, allow_shared_gpu=request.allow_shared_gpu)

    def workspace(self) -> type[TRTLLMAllReduceFusionWorkspace]:
        """See `WindowAllReduce.workspace`."""
        from comm_nvlink.allreduce_workspace import TRTLLMAllReduceFusionWorkspace

        return TRTLLMAllReduceFusionWorkspace
