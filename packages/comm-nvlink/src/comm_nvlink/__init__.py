"""comm-nvlink: exchanges over NVLink between the GPUs of one host."""

from comm_nvlink._version import __version__

__all__ = ["__version__"]
