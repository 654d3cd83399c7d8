"""The workspace that plugins instantiate: `allreduce_fusion` by Lamport kernels over windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch

from comm_core import _cuda, _env
from comm_core._dtypes import dtype_name
from comm_core.allreduce import launch as launches
from comm_core.allreduce.known import Given, KnownCall, KnownCalls, KnownKind
from comm_core.allreduce.launch import MAX_SHARED_BYTES, VECTOR_BYTES, Encoding, Launch, Settings, Shape
from comm_core.allreduce.module import NO_EPILOGUE, Epilogue
from comm_core.allreduce.patterns import PATTERNS, Quantization
from comm_core.allreduce.session import ReduceSession
from comm_core.allreduce.workspace import AllReduceFusionWorkspace
from comm_core.comm_backend import group_of
from comm_core.errors import ArgumentValueError, TransportError
from comm_core.ulysses.validation import has_memory

if TYPE_CHECKING:
    from typing_extensions import Self

    from comm_core._json import JsonObject
    from comm_core.allreduce.backend import FusionCall
    from comm_core.comm_backend import CommBackend
    from comm_core.consensus import Transaction
    from comm_core.jit.spec import ModuleSpec
    from comm_core.transport.interface import Request

__all__ = ["KERNEL_PATTERNS", "WindowAllReduceWorkspace", "check_alignment", "epilogue_of"]

KERNEL_PATTERNS = frozenset(pattern for pattern, spec in PATTERNS.items() if not spec.is_moe)
"""What the kernels compute."""

_ENCODINGS = {
    Quantization.NONE: Encoding.NONE,
    Quantization.FP8: Encoding.FP8,
    Quantization.DYNAMIC_FP8: Encoding.DYNAMIC_FP8,
    Quantization.GROUP_FP8: Encoding.GROUP_FP8,
    Quantization.NVFP4: Encoding.NVFP4,
    Quantization.MXFP8: Encoding.MXFP8,
}
_TENSORS = ("input", "output", "residual_in", "residual_out", "rms_gamma", "norm_out", "quant_out")


def check_alignment(call: FusionCall) -> None:
    """Raise unless every tensor has memory, and begins where vectors of 16 bytes can be loaded and stored.

    Raises:
        ArgumentValueError: it names the first tensor that does not.
    """
    for name in _TENSORS:
        value = cast("torch.Tensor | None", getattr(call, name))
        if value is not None and _memory(value, name) % VECTOR_BYTES:
            raise ArgumentValueError(
                f"{name} must begin at a multiple of {VECTOR_BYTES} bytes, got address {value.data_ptr():#x}: a "
                "slice of a larger tensor may not; clone it"
            )
    if call.scale_out is not None and _memory(call.scale_out, "scale_out") % 4:
        raise ArgumentValueError(
            f"scale_out must begin at a multiple of 4 bytes, got address {call.scale_out.data_ptr():#x}"
        )
    if isinstance(call.scale_factor, torch.Tensor):
        _memory(call.scale_factor, "scale_factor")


def _memory(value: torch.Tensor, name: str) -> int:
    """Return the address of a tensor that has memory."""
    if not has_memory(value):
        raise ArgumentValueError(
            f"{name} has no memory of its own ({type(value).__name__}), or it was given back: pass a plain tensor"
        )
    return value.data_ptr()


def _address(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.data_ptr()


def epilogue_of(call: FusionCall, quantization: Quantization) -> Epilogue:
    """Return what follows the sum of a call whose arguments were found good."""
    factor = call.scale_factor
    on_device = isinstance(factor, torch.Tensor)
    return Epilogue(
        residual_in=_address(call.residual_in),
        residual_out=_address(call.residual_out),
        gamma=_address(call.rms_gamma),
        norm_out=_address(call.norm_out),
        quant_out=_address(call.quant_out),
        scale_out=_address(call.scale_out),
        scale=_address(factor) if on_device else 0,
        scale_value=0.0 if on_device or factor is None else float(factor),
        eps=call.rms_eps,
        weight_bias=call.weight_bias,
        encoding=_ENCODINGS[quantization],
        layout=int(call.layout),
        group_vectors=call.group_size * call.dtype.itemsize // VECTOR_BYTES,
        rows=call.tokens,
        row_vectors=call.hidden * call.dtype.itemsize // VECTOR_BYTES,
        hidden=call.hidden,
    )


class WindowAllReduceWorkspace(AllReduceFusionWorkspace):
    """A workspace over windows of peer memory, by the kernels of include/comm_core/allreduce.cuh.

    A plugin's class says its backend's name, and its backend opens it with `open_in`::

        class TRTLLMAllReduceFusionWorkspace(WindowAllReduceWorkspace):
            name = "trtllm"
    """

    name: ClassVar[str]
    """Of the backend."""
    patterns = KERNEL_PATTERNS
    shared_resources = True
    _session: ReduceSession
    _known: KnownCalls
    _ordinal: int

    @classmethod
    def open_in(
        cls,
        stages: Transaction,
        request: Request,
        plan: JsonObject,
        device: torch.device,
        spec: ModuleSpec,
        form: str,
        half_bytes: int | None = None,
    ) -> Self:
        """Build, allocate, map and test as steps of `stages`. Collective.

        Args:
            stages: the transaction; it owns everything.
            request: what the ranks asked for.
            plan: JSON of `comm_core.allreduce.launch.Settings`.
            device: this rank's device.
            spec: the plugin's module.
            form: of peer memory.
            half_bytes: of half the buffer; None is what the request's largest operand needs.
        """
        from comm_core import jit

        # A cold build may take longer than a rank may be late.
        seconds = max(request.timeout_s, _env.jit_timeout_s())
        module = stages.step("build allreduce", lambda: jit.load(spec, device), timeout_s=seconds)
        settings = Settings.from_json(plan)
        if half_bytes is None:
            force = bool(request.options.get("force_oneshot_support", False))
            half_bytes = launches.capacity_bytes(request.world_size, request.max_bytes, force, settings.trade_bytes)
        session = ReduceSession(
            stages,
            module,
            device,
            half_bytes=half_bytes,
            settings=settings,
            form=form,
            timeout_s=request.timeout_s,
            poison=_env.on_stall() == "poison",
        )
        dtype: torch.dtype = getattr(torch, request.dtype)
        return cls.around(session, request.world_size, stages.group.rank, dtype, half_bytes)

    @classmethod
    def around(cls, session: ReduceSession, world_size: int, rank: int, dtype: torch.dtype, half_bytes: int) -> Self:
        """Return a workspace over an open session, which it then owns.

        Args:
            session: the session.
            world_size: ranks of the group.
            rank: this rank.
            dtype: element type that it was made for.
            half_bytes: what it is said to hold.
        """
        made = cls.__new__(cls)
        AllReduceFusionWorkspace.__init__(
            made, world_size, rank, dtype=dtype, device=session.device, buffer_bytes=half_bytes
        )
        made._session = session
        made._known = KnownCalls()
        made._ordinal = session.device.index if session.device.type == "cuda" else -1
        return made

    def _take(self, other: AllReduceFusionWorkspace) -> None:
        """Become what `other` is, which is then nothing: for constructors that open by the decision protocol."""
        vars(self).update(vars(other))
        other._destroyed = True

    @property
    def backend(self) -> str:
        """See `AllReduceFusionWorkspace.backend`."""
        return self.name

    @property
    def memory_form(self) -> str:
        """How the ranks share memory."""
        return self._session.memory_form

    def required_bytes(
        self, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
    ) -> int:
        """See `AllReduceFusionWorkspace.required_bytes`: of half the buffer."""
        nbytes = num_tokens * hidden_dim * dtype.itemsize
        return launches.required_bytes(self.world_size, nbytes, use_oneshot, self._session.settings.trade_bytes)

    def check_call(self, call: FusionCall) -> None:
        """See `AllReduceFusionWorkspace.check_call`: rows in whole vectors, that fit a block; alignment."""
        check_alignment(call)
        if not PATTERNS[call.pattern].has_norm:
            return
        itemsize = call.dtype.itemsize
        elements = VECTOR_BYTES // itemsize
        if call.hidden % elements:
            raise ArgumentValueError(
                f"input: {call.pattern.name} with backend {self.backend!r} needs a hidden_dim that is a multiple of "
                f"{elements} for {dtype_name(call.dtype)} (rows of whole {VECTOR_BYTES} bytes), got {call.hidden}; "
                "pad it, or use backend='dist'"
            )
        if call.group_size % elements:
            raise ArgumentValueError(
                f"block_quant_group_size with backend {self.backend!r} must be a multiple of {elements} for "
                f"{dtype_name(call.dtype)}, got {call.group_size}; backend='dist' takes any that divides hidden_dim"
            )
        row_vectors, group_vectors = call.hidden // elements, call.group_size // elements
        if not launches.fits_a_block(row_vectors, group_vectors):
            raise ArgumentValueError(
                f"input: a row of hidden_dim={call.hidden} {dtype_name(call.dtype)} does not fit a block of backend "
                f"{self.backend!r}: at most {MAX_SHARED_BYTES // (2 * itemsize)} elements do, less with groups "
                "beyond a warp; use backend='dist', or all-reduce and normalize apart"
            )

    def run_known(self, given: Given) -> torch.Tensor | None:
        """See `AllReduceFusionWorkspace.run_known`."""
        # With `COMM_CHECK` the ranks compare every call, which is the full path's.
        if self._checked_group is not None or not self._busy.acquire(False):
            return None
        try:
            if self._destroyed or self._broken is not None:
                return None
            known = self._known.find(given, self._session.settings)
            if known is None:
                return None
            try:
                result = known.result(given)
            except (RuntimeError, NotImplementedError, TypeError):
                return None  # there is no memory, or none that has an address; the full path says why
            if result is None:
                return None
            if _cuda.is_current(self._ordinal):
                self._launch_known(known)
            else:
                with _cuda.device_guard(self.device):
                    self._launch_known(known)
            return result
        finally:
            self._busy.release()

    def _launch_known(self, known: KnownCall) -> None:
        context = self._session.launch_context()
        self._calls += 1
        try:
            known.launch(self._session.entry, context)
        except TransportError as error:
            self._broken = str(error)
            raise

    def keep(self, given: Given, call: FusionCall) -> None:
        """See `AllReduceFusionWorkspace.keep`."""
        # Scales may be of any element type, and complex ones may be conjugated lazily, which is not looked at.
        if call.scale_out is not None and call.scale_out.dtype.is_complex:
            return
        # Between its call and here, another thread may be in a call of its own.
        if not self._busy.acquire(False):
            return
        try:
            self._known.keep(given, lambda: self._kind(given, call))
        finally:
            self._busy.release()

    def _kind(self, given: Given, call: FusionCall) -> KnownKind:
        shape, launch, epilogue = self._geometry(call)
        dtype = dtype_name(call.dtype)
        fields = self._session.entry.fields(0, 0, dtype, shape, launch, epilogue)
        return KnownKind(call, given, fields, self._session.settings)

    def _geometry(self, call: FusionCall) -> tuple[Shape, Launch, Epilogue]:
        """Return operand, launch and epilogue of a call."""
        settings = self._session.settings
        nbytes = call.tokens * call.hidden * call.dtype.itemsize
        shape = launches.shape_of(self.world_size, nbytes, call.use_oneshot, settings.trade_bytes)
        epilogue = NO_EPILOGUE
        if PATTERNS[call.pattern].has_norm:
            epilogue = epilogue_of(call, _quantization(call))
            launch = launches.fused_launch(
                call.tokens,
                epilogue.row_vectors,
                settings,
                epilogue.group_vectors,
                two_shots=shape.two_shots,
                encoded=epilogue.encoding != Encoding.NONE,
            )
        else:
            launch = launches.plain_launch(shape, settings)
        return shape, launch, epilogue

    def _run(self, call: FusionCall) -> None:
        shape, launch, epilogue = self._geometry(call)
        self._session.reduce(
            call.input.data_ptr(),
            _address(call.output),
            dtype_name(call.dtype),
            shape,
            launch,
            epilogue,
            early=call.launch_with_pdl,
            lead=call.launch_with_pdl and not call.trigger_completion_at_end,
        )

    # Stalls, checkpoint, the end

    def check(self) -> None:
        """Raise if a kernel of this workspace has given up or was told to. Local.

        Raises:
            PeerStalledError: it names the rank that was waited for.
        """
        self._session.check()

    def check_usable(self, operation: str) -> None:
        """See `AllReduceFusionWorkspace.check_usable`.

        Raises:
            PeerStalledError: a rank did not come to an earlier call; it is named.
            CheckpointError: the memory is detached.
        """
        super().check_usable(operation)
        self._session.check()

    def checkpoint_prepare(self) -> None:
        """See `AllReduceFusionWorkspace.checkpoint_prepare`; memory of VMM handles can, that of CUDA IPC can't."""
        self.check_alive("checkpoint_prepare")
        if not self._session.detachable:
            raise self._no_checkpoint("checkpoint_prepare")
        with self._between_calls("checkpoint_prepare"):
            self._session.checkpoint_prepare()

    def checkpoint_restore(self, comm_backend: CommBackend) -> None:
        """See `AllReduceFusionWorkspace.checkpoint_restore`."""
        self.check_alive("checkpoint_restore")
        if not self._session.detachable:
            raise self._no_checkpoint("checkpoint_restore")
        group = group_of(comm_backend)
        with self._between_calls("checkpoint_restore"):
            self._session.checkpoint_restore(group)
            if self._checked_group is not None:
                self._checked_group = group

    def check_alive(self, operation: str) -> None:
        """Raise where this was destroyed."""
        AllReduceFusionWorkspace.check_usable(self, operation)

    def _destroy(self, timeout_s: float | None) -> None:
        self._session.close(timeout_s)


def _quantization(call: FusionCall) -> Quantization:
    return PATTERNS[call.pattern].quantization if call.quant_out is not None else Quantization.NONE
