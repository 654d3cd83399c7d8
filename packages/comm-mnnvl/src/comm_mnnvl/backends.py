"""Who the ranks are where nobody says so: torch.distributed where it is initialized, else MPI."""

from __future__ import annotations

from comm_core.comm_backend import CommBackend, MPIBackend, NoProcessGroupError, TorchDistBackend

__all__ = ["default_backend", "mpi_barrier"]


def default_backend(backend: CommBackend | None = None) -> CommBackend:
    """Return `backend`, or the one of all ranks of this job. Local.

    Raises:
        MPIMissingError: none was given, torch.distributed is not initialized, and there is no mpi4py.
    """
    if backend is not None:
        return backend
    try:
        return TorchDistBackend()
    except NoProcessGroupError:
        return MPIBackend()


def mpi_barrier() -> None:
    """Wait until every rank of ``MPI.COMM_WORLD`` has called. Collective, without a deadline.

    Raises:
        MPIMissingError: mpi4py, or the MPI library under it, is not there.
    """
    MPIBackend().barrier()
