"""The CUDA module of the all-reduce as Python sees it. A plugin instantiates it, see `reduce_module`.

Plain data; importing this imports neither torch nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from comm_core.allreduce.launch import Encoding, Launch, Shape
from comm_core.jit.spec import ModuleSpec
from comm_core.windows.signals import MAX_RANKS

if TYPE_CHECKING:
    from comm_core.jit import Module

__all__ = ["NO_EPILOGUE", "PLACES", "Epilogue", "ReduceCall", "reduce_module"]

_EPILOGUE = "7P3f3IQ2I"
_DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2}
"""Twin: include/comm_core/allreduce_module.cuh, ReduceType."""


def reduce_module(package: str) -> ModuleSpec:
    """Return the module of a package whose ``csrc/allreduce.cu`` says ``COMM_ALLREDUCE_MODULE(<package>)``."""
    return ModuleSpec(
        name=f"{package}_allreduce",
        package=package,
        sources=("csrc/allreduce.cu",),
        structs={
            # stream, session, buffers, input, output; vectors of operand, half and slot; tail, two shots, operation,
            # type, fused, blocks, threads, team, early, lead, shared bytes; epilogue
            f"{package}_allreduce_args_v1": f"II5P3Q11I{_EPILOGUE}0Q",
            # see comm_core.windows.launch
            "comm_core_session_v1": f"II2I{MAX_RANKS}Q3Q0Q",
        },
        entry_points={f"{package}_allreduce_v1": f"{package}_allreduce_args_v1"},
    )


class Epilogue(NamedTuple):
    """What follows the sum; addresses are 0 for what is not wanted. Twin: include/comm_core/epilogue.cuh."""

    residual_in: int = 0
    residual_out: int = 0
    gamma: int = 0
    norm_out: int = 0
    quant_out: int = 0
    scale_out: int = 0
    scale: int = 0
    scale_value: float = 0.0
    eps: float = 0.0
    weight_bias: float = 0.0
    encoding: int = Encoding.NONE
    layout: int = 0
    group_vectors: int = 0
    rows: int = 0
    row_vectors: int = 0
    hidden: int = 0


NO_EPILOGUE = Epilogue()
_HEAD = (
    "buffers", "input", "output", "vectors", "half_vectors", "slot_vectors", "tail_bytes", "two_shots", "operation",
    "type", "fused", "blocks", "threads", "team", "early", "lead", "shared_bytes",
)  # fmt: skip
PLACES = {name: place for place, name in enumerate((*_HEAD, *Epilogue._fields))}
"""Where each field is in `ReduceCall.fields`."""


class ReduceCall:
    """The entry point of a loaded module, with what one session passes every time.

    Args:
        module: of `reduce_module`.
        buffers: host address of the addresses of all ranks' buffers.
        half_vectors: vectors of half a buffer.
        operation: number for the record of a stall.
    """

    def __init__(self, module: Module, buffers: int, half_vectors: int, operation: int) -> None:
        (entry_point,) = module.spec.entry_points
        self.pack, self.run = module.bind_parts(entry_point)
        self._buffers, self._half_vectors, self._operation = buffers, half_vectors, operation

    def __call__(
        self,
        stream: int,
        session: int,
        source: int,
        output: int,
        dtype: str,
        shape: Shape,
        launch: Launch,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        early: bool = False,
        lead: bool = False,
    ) -> None:
        """Launch one all-reduce; see include/comm_core/allreduce_module.cuh, ReduceArgs."""
        fields = self.fields(source, output, dtype, shape, launch, epilogue, early=early, lead=lead)
        self.run(self.pack(stream, session, *fields))

    def fields(
        self,
        source: int,
        output: int,
        dtype: str,
        shape: Shape,
        launch: Launch,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        early: bool = False,
        lead: bool = False,
    ) -> tuple[int | float, ...]:
        """Return what `pack` takes behind the stream and the session; each is where `PLACES` says."""
        return (
            self._buffers,
            source,
            output,
            shape.vectors,
            self._half_vectors,
            shape.slot_vectors,
            shape.tail_bytes,
            shape.two_shots,
            self._operation,
            _DTYPES[dtype],
            epilogue is not NO_EPILOGUE,
            launch.blocks,
            launch.threads,
            launch.team,
            early,
            lead,
            launch.shared_bytes,
            *epilogue,
        )
