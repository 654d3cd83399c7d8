"""UlyssesCommunicator: decides once; has its calls checked and planned, and made over what was opened."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from comm_core import known
from comm_core._dtypes import dtype_name
from comm_core.comm_backend import group_of
from comm_core.errors import ArgumentTypeError, UnsupportedError
from comm_core.group import Group, as_group
from comm_core.selection import Asked, resolve
from comm_core.transport.opening import Opened, open_transport
from comm_core.ulysses.arguments import Arguments
from comm_core.ulysses.call import agree_output
from comm_core.ulysses.codec import CodecHost, CodecWorkspace, find_codec
from comm_core.ulysses.decision import UlyssesBackendDecision, passthrough
from comm_core.ulysses.execution import Execution
from comm_core.ulysses.preparation import Preparation
from comm_core.ulysses.validation import Limits, positive_int
from comm_core.ulysses.workspace import UlyssesWorkspace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from comm_core.comm_backend import CommBackend

__all__ = ["UlyssesCommunicator"]


class UlyssesCommunicator:
    """The all-to-alls of Ulysses sequence parallelism over ``[B, S, H, D]``.

    An attention layer makes four calls: Q, K and V through `scatter_heads`, the output through `gather_heads`. All
    transports give the same bits.

    The constructor is collective, and decides on the transport before anything is allocated or compiled. Every rank
    must then make the same calls in the same order with equal geometry, one at a time; ``COMM_CHECK=1`` (on every
    rank) verifies this before each call and raises on every rank where it does not hold. Calls run on the current
    stream. They are not differentiable.

    Args:
        group: process group of the Ulysses ranks (or a `comm_core.group.Group`); None is WORLD.
        max_bytes: capacity of one operand in bytes, equal on all ranks; at most ``(2**31 - 1) * 4``.
        dtype: default element type: any plain dtype of 1, 2 or 4 bytes.
        backend: ``"auto"``, or the name of a transport, which is then used or refused on every rank: ``"nccl"`` and
            ``"gloo"`` are built in, ``"nvlink"``, ``"pcie"`` and ``"mnnvl"`` come with their packages, others with
            other plugins.
        nvlink_kernel: ``"auto"``, ``"portable"`` or ``"cake"``; equal on all ranks.
        device: this rank's device. None is the current CUDA device where the group has NCCL or CUDA is initialized
            in this process, else the CPU. An int is a CUDA ordinal.
        max_elems: deprecated: the capacity in elements of `dtype`. Give exactly one capacity.
        max_sms: most multiprocessors that a call may use while bytes travel, for calls beside other kernels; 0 leaves
            the transfer to the copy engines alone. None is the transport's choice. Equal on all ranks; transports
            whose kernels are not theirs to size (``"nccl"``) take no notice.
        pool_bytes: size of the arena of `memory_pool` in bytes; 0 is none. Equal on all ranks.

    Raises:
        ArgumentTypeError: the group is none (raised here alone; everything else is raised on every rank).
        JointValueError: a rank's arguments are invalid, or the ranks' arguments, environment or plugins don't fit.
        UlyssesBackendError: the backend that was asked for can't be used.
        GroupTimeoutError: a rank is missing.
    """

    def __init__(
        self,
        group: ProcessGroup | Group | None = None,
        *,
        max_bytes: int | None = None,
        dtype: torch.dtype,
        backend: str = "auto",
        nvlink_kernel: str = "auto",
        device: torch.device | str | int | None = None,
        max_elems: int | None = None,
        max_sms: int | None = None,
        pool_bytes: int = 0,
    ) -> None:
        members = as_group(group)
        arguments = Arguments(max_bytes, max_elems, dtype, nvlink_kernel, device, max_sms, pool_bytes, members)
        if members.size == 1:
            arguments.raise_first()
        asked = Asked(
            "UlyssesCommunicator",
            backend,
            arguments.device,
            dtype_name(arguments.dtype),
            arguments.dtype.itemsize,
            arguments.max_bytes,
            arguments.options,
            tuple(map(str, arguments.errors)),
        )
        opened = _decide_and_open(members, asked)
        decision = opened.decision
        self._limits = Limits(arguments.device, arguments.dtype, arguments.max_bytes)
        self._checked = decision.request.environment.get("COMM_CHECK") == "1"
        self._execution = Execution(
            members, opened.session, decision.backend, arguments.device, checked=self._checked
        )
        self._decision = UlyssesBackendDecision.of(decision)
        self._topology_decision = UlyssesBackendDecision.of(opened.resolved)
        of_route = None if opened.session is None else opened.session.fallback_reason
        self._fallback_reason = "; ".join(filter(None, (opened.fallback_reason, of_route))) or None
        properties = None if opened.session is None else opened.session.properties
        self._preparation = Preparation(self._limits, members.rank, members.size, decision.backend, properties)
        # Last: `__del__` asks for everything else of an object that has it.
        self._session = opened.session

    # Properties

    @property
    def backend(self) -> str:
        """Name of the transport that is used."""
        return self._decision.backend

    @property
    def transport(self) -> str | None:
        """Route of a transport that has several (``"p2p"``, ``"hybrid"`` or ``"rdma"`` for PCIe), else None."""
        return None if self._session is None else self._session.route

    @property
    def decision(self) -> UlyssesBackendDecision:
        """The decision as it came out, with everything that was considered."""
        return self._decision

    @property
    def topology_decision(self) -> UlyssesBackendDecision:
        """The decision before anything was opened; `decision` differs where opening failed and `auto` fell back."""
        return self._topology_decision

    @property
    def fallback_reason(self) -> str | None:
        """Why ``"auto"``, or the transport among its routes, did not take what it prefers; None where it did."""
        return self._fallback_reason

    @property
    def nvlink_kernel(self) -> str | None:
        """Which kernel the NVLink transport launches; None unless it is armed."""
        return self._session.kernel if self._session is not None and self.backend == "nvlink" else None

    @property
    def max_bytes(self) -> int:
        """Capacity of one operand in bytes."""
        return self._limits.max_bytes

    @property
    def max_elems(self) -> int:
        """Capacity of one operand in elements of the construction dtype."""
        return self._limits.max_bytes // self._limits.dtype.itemsize

    @property
    def dtype(self) -> torch.dtype:
        """Default element type."""
        return self._limits.dtype

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._limits.device

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self._execution.group.rank

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return self._execution.group.size

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this rank for others so far; grows with every call that exchanged something."""
        return self._execution.bytes_sent

    # Whole-head calls

    def scatter_heads(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """Scatter the heads and gather the sequence: ``[B, S_local, H, D] -> [B, S_global, H_local, D]``. Collective.

        Args:
            x: contiguous operand; ``H % world_size == 0``.
            out: contiguous output of that shape; must not overlap `x` (with one rank it may be `x` itself).
            dtype: element type of this call; None is the communicator's.
            workspace: staging for transports that pack; other transports check it and don't use it.

        Returns:
            `out`, or a new tensor; with one rank and no `out`, `x` itself.

        Raises:
            ArgumentTypeError: `x`, `out` or `workspace` is something else.
            ArgumentValueError: anything else about the arguments; nothing was communicated.
            ClosedError: after `close`.
            TransportError: the exchange failed; the communicator is then broken.
        """
        return self._execution.run(
            "scatter_heads", self._preparation.whole, "scatter_heads", x, out, dtype, workspace
        )

    def gather_heads(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """Gather the heads and scatter the sequence: ``[B, S_global, H_local, D] -> [B, S_local, H, D]``. Collective.

        The inverse of `scatter_heads`; arguments, result and errors as there, with ``S_global % world_size == 0``.
        """
        return self._execution.run("gather_heads", self._preparation.whole, "gather_heads", x, out, dtype, workspace)

    def exchange_chunks(
        self, x: torch.Tensor, *, out: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Exchange equal packed chunks: ``[1, 1, W, chunk] -> [1, 1, W, chunk]``. Collective.

        Chunk r goes to rank r and lands in slot `rank` there. The bytes are moved as they are.

        Args:
            x: contiguous operand.
            out: contiguous output of the same shape; must not overlap `x` (with one rank it may be `x` itself).
            dtype: element type of this call; None is the communicator's.

        Returns:
            `out`, or a new tensor; with one rank and no `out`, `x` itself.

        Raises:
            As `scatter_heads`.
        """
        return self._execution.run("exchange_chunks", self._preparation.whole, "exchange_chunks", x, out, dtype, None)

    # Head-chunk calls

    def scatter_qkv_head_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        head_offset: int,
        head_count: int,
        out: torch.Tensor | None = None,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """Scatter one band of heads of Q, K and V with one exchange. Collective.

        A building block for pipelines of the caller's own: it chooses no schedule and makes no stream. A caller that
        overlaps both directions uses a communicator and a workspace for each.

        Args:
            query: ``[B, S_local, H, D]``, any positive strides; ``H % world_size == 0``.
            key: like `query`, with strides of its own.
            value: like `query`, with strides of its own.
            head_offset: where the band begins within each rank's ``H / world_size`` heads.
            head_count: heads of the band.
            out: contiguous ``[B, S_global, head_count, 3 * D]``; must not overlap an operand.
            workspace: staging for transports that pack, of at least the output's elements. Without `out`, with one
                batch and on such a transport, the result *is* the receive buffer of the workspace and is good until
                the workspace is used again.

        Returns:
            ``[B, S_global, head_count, 3 * D]``; splitting the last dimension gives Q, K and V.

        Raises:
            As `scatter_heads`.
        """
        prepare = self._preparation.scatter_qkv_head_chunk
        return self._execution.run(
            "scatter_qkv_head_chunk", prepare, query, key, value, head_offset, head_count, out, workspace
        )

    def gather_output_head_chunk(
        self,
        x: torch.Tensor,
        *,
        local_heads: int,
        head_offset: int,
        out: torch.Tensor,
        workspace: UlyssesWorkspace | None = None,
    ) -> torch.Tensor:
        """Gather one band of attention output into the full output. Collective.

        Args:
            x: ``[B, S_global, head_count, D]``, any positive strides; ``S_global % world_size == 0``.
            local_heads: heads that this rank owns in the full output.
            head_offset: where the band begins within them.
            out: contiguous ``[B, S_local, world_size * local_heads, D]``; only the band is written.
            workspace: staging for transports that pack, of at least the elements of `x`.

        Returns:
            `out`.

        Raises:
            As `scatter_heads`.
        """
        prepare = self._preparation.gather_output_head_chunk
        return self._execution.run("gather_output_head_chunk", prepare, x, local_heads, head_offset, out, workspace)

    # Storage

    def allocate_output(self, x: torch.Tensor, op: str, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate an output for calls like ``op(x)``.

        On transports with registered or directly written outputs this is collective, and the output stays theirs
        until `close`; on ``"nccl"`` and ``"gloo"`` it is ordinary storage.

        Args:
            x: operand that the output is sized for, as `op` takes it.
            op: ``"scatter_heads"``, ``"gather_heads"`` or ``"exchange_chunks"``.
            dtype: element type of the calls that the output serves; None is the communicator's.

        Returns:
            Tensor of the shape that `op` makes of `x`.

        Raises:
            As `scatter_heads`.
        """
        self._execution.check_usable("allocate_output")
        if self._session is not None and self._session.properties.shared_resources:
            # A rank that refuses its arguments alone would leave the others in the middle of an allocation.
            shape, element = agree_output(self._execution.group, op, lambda: self._preparation.output(x, op, dtype))
        else:
            shape, element = self._preparation.output(x, op, dtype)
        with self._execution.on_device():
            if self._session is None:
                return torch.empty(shape, dtype=element, device=self.device)
            return self._session.allocate_output(shape, element, self.device)

    def memory_pool(self) -> contextlib.AbstractContextManager[object]:
        """Allocate tensors in memory that needs no staging: ``with comm.memory_pool(): y = torch.empty(…)``.

        Every allocation of this thread on this device inside the block comes from the communicator's arena of
        `pool_bytes`, through torch's caching allocator (which takes it in steps of 2 MiB, and of 20 MiB for sizes
        from 1 to 10 MiB). A tensor of the pool may be the output of any call, at any offset, on this rank alone. It
        must not be used after `close`, and a captured graph that writes it needs it alive for as long as it is
        replayed: the peers write the address that was captured. Local.

        Raises:
            UnsupportedError: the transport has no such memory, or `pool_bytes` was 0.
            torch.OutOfMemoryError: inside the block, where the arena is exhausted; it says what to raise.
        """
        self._execution.check_usable("memory_pool")
        if self._session is None:
            # One rank: no peer writes anything, so any memory will do.
            return contextlib.nullcontext()
        return self._session.memory_pool()

    def create_workspace(self, *, max_elems: int | None = None) -> UlyssesWorkspace:
        """Allocate staging for this communicator. Local.

        Args:
            max_elems: capacity of each of the two buffers in elements; None fills the communicator's capacity.

        Raises:
            UnsupportedError: the transport takes no staging, only registered outputs.
            ArgumentValueError: `max_elems` is not positive or above the communicator's capacity.
        """
        self._execution.check_usable("create_workspace")
        if self._session is not None and self._session.properties.registered_outputs:
            raise UnsupportedError(
                f"{self.backend} has no staging buffers: allocate outputs with allocate_output instead"
            )
        elems = self.max_elems if max_elems is None else positive_int(max_elems, "max_elems", self.max_elems)
        return UlyssesWorkspace(max_elems=elems, dtype=self.dtype, device=self.device)

    def input_buffer(self, out: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the transport's own input staging behind a registered output, as a view of `shape`.

        Raises:
            UnsupportedError: the transport has none; that of comm-pcie has.
            ArgumentTypeError: `out` is no tensor, or `shape` no sequence.
        """
        self._execution.check_usable("input_buffer")
        if self._session is None or not self._session.properties.registered_outputs:
            raise UnsupportedError(
                f"{self.backend} stages no inputs, so there is nothing to build an operand in: pass any tensor. "
                f"Input buffers belong to backend 'pcie' above one rank; {known.install_hint('pcie')}"
            )
        if not isinstance(out, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"input_buffer: out must be a torch.Tensor, got {type(out).__name__}")
        if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"input_buffer: shape must be a sequence of ints, got {type(shape).__name__}")
        return self._session.input_buffer(out, tuple(shape))

    # Encodings

    def prepare_qkv(
        self, qkv_shape: Sequence[int], *, quantization: str = "sage2", used_sequence: int | None = None
    ) -> Any:
        """Prepare the low-precision QKV exchange of a codec. Collective.

        Args:
            qkv_shape: local ``[B, L, H, D]`` of Q, K and V.
            quantization: name of the codec.
            used_sequence: global live prefix; None is the whole sequence.

        Returns:
            The codec's workspace, which `scatter_qkv` takes; of ``"sage2"`` a `comm_lowp.UlyssesQKVWorkspace`.

        Raises:
            JointError: the codec is missing or broken on some rank (the text names the package to install), or a step
                of the preparation failed on some rank. What was prepared before stays usable.
        """
        self._execution.check_usable("prepare_qkv")
        codec = find_codec(self._execution.group, quantization)
        with self._execution.on_device(), torch.no_grad():
            return codec.prepare_qkv(self._host, qkv_shape, used_sequence)

    def scatter_qkv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        workspace: CodecWorkspace,
        out: object | None = None,
    ) -> Any:
        """Encode and exchange Q, K and V as prepared by `prepare_qkv`. Collective.

        Args:
            q: local ``[B, L, H, D]`` as prepared, in the communicator's dtype.
            k: likewise.
            v: likewise.
            workspace: from this communicator's `prepare_qkv`.
            out: a result of an earlier call with an equal workspace, to be written again.

        Returns:
            The codec's result, or `out`; of ``"sage2"`` a `comm_lowp.UlyssesQKV`.

        Raises:
            ArgumentTypeError: `workspace` was not made by `prepare_qkv`.
            ArgumentValueError: anything else about the arguments; nothing was communicated.
            TransportError: the exchange failed; the communicator is then broken.
        """
        if not isinstance(workspace, CodecWorkspace):  # pyright: ignore[reportUnnecessaryIsInstance]
            # As a call, because in checked mode the other ranks wait for this one's word.
            return self._execution.run_encoded("scatter_qkv", _refuse_workspace, workspace)
        return workspace.scatter_qkv(self._host, q, k, v, out)

    @cached_property
    def _host(self) -> CodecHost:
        return CodecHost(
            group=self._execution.group,
            session=self._session,
            backend=self.backend,
            device=self.device,
            dtype=self.dtype,
            max_bytes=self.max_bytes,
            checked=self._checked,
            run=self._execution.run_encoded,
            launch=self._execution.launch_known,
        )

    # Stalls

    def check(self) -> None:
        """Raise if an earlier call has stalled on the device. Local; for those who replay graphs and make no calls.

        Raises:
            PeerStalledError: it names the rank that was waited for; the communicator is then broken on every rank.
        """
        self._execution.check()

    # Checkpoint

    def checkpoint_prepare(self) -> None:
        """Give up the physical memory and keep its addresses, before the process is checkpointed. Collective.

        Waits for a call of another thread, and for the device. Outputs of `allocate_output` and captured graphs stay
        what they are, and neither may be touched until `checkpoint_restore`; what registered outputs hold is lost.
        The group is let go: it may be destroyed. Nothing is done where this is the state already.

        Raises:
            UnsupportedError: the transport can't (only those with virtual memory can, as ``"mnnvl"``); or a call of
                another thread does not end by the deadline, on this rank alone.
            JointError: a capture is under way on some rank, or the ranks are at different calls. On every rank;
                nothing has changed.
            CheckpointError: it failed half-way. The communicator is then of no more use, on any rank.
        """
        self._execution.checkpoint_prepare()
        # The object stays: workspaces of codecs know their communicator by it.
        self._host.group = self._execution.group

    def checkpoint_restore(self, comm_backend: CommBackend | ProcessGroup | Group | None) -> None:
        """Bring the memory back at the same addresses, after the process was restored. Collective.

        When it returns, every rank is ready: captured graphs can be replayed and calls be made. Nothing is done where
        this is the state already.

        Args:
            comm_backend: the ranks in their old order: a `CommBackend`, a process group, or a `comm_core` group; None
                is WORLD.

        Raises:
            ArgumentTypeError, ArgumentValueError: it is no group, or one of another size. Nothing was communicated.
            JointValueError: a rank has another place in it. On every rank; nothing has changed.
            JointError, CheckpointError, UnsupportedError: as in `checkpoint_prepare`.
        """
        self._execution.checkpoint_restore(group_of(comm_backend))
        self._host.group = self._execution.group

    # End of life

    def close(self, timeout: float | None = None) -> None:
        """Release the transport. Collective where it shares memory between the ranks, else local. Idempotent.

        A call or a `close` of another thread is waited for. After a failure it may be called again, by every rank.

        Args:
            timeout: seconds to wait for the other thread, and for the other ranks; None is ``COMM_TIMEOUT_S``.

        Raises:
            UnsupportedError: a call of another thread does not end in that time, on this rank alone.
            JointError: something could not be released on some rank.
            GroupTimeoutError: a rank did not come; what only this rank uses was released.
        """
        self._execution.close(timeout)

    def __enter__(self) -> UlyssesCommunicator:
        """Return the communicator itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def __del__(self) -> None:
        """Warn about shared memory that was not released; never communicate."""
        session = getattr(self, "_session", None)
        if session is not None and not self._execution.closed and session.properties.shared_resources:
            warnings.warn(
                f"a UlyssesCommunicator over {self.backend} was never closed: its shared memory is kept until the "
                "process ends; use it as a context manager or call close() on every rank",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        """Return rank, backend and state."""
        return (
            f"UlyssesCommunicator(rank={self.rank}/{self.world_size}, backend={self.backend!r}, "
            f"dtype={dtype_name(self.dtype)}, device={self.device}, max_bytes={self.max_bytes}, "
            f"{self._execution.state})"
        )


def _refuse_workspace(workspace: object) -> NoReturn:
    raise ArgumentTypeError(
        f"workspace must come from prepare_qkv, got {type(workspace).__name__}; {known.install_hint('sage2')}"
    )


def _decide_and_open(group: Group, asked: Asked) -> Opened:
    """Decide, and open what was decided; one rank exchanges nothing. Collective."""
    device = asked.device
    if group.size == 1 and asked.backend == "auto" and device is not None:
        decision = passthrough(asked, device)
        return Opened(decision, decision, None, decision.reason)
    decision = resolve(group, asked)
    if group.size == 1:
        return Opened(decision, decision, None, None)
    assert device is not None
    return open_transport(group, decision, device)
