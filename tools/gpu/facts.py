"""``python -m gpu.facts FILE``: what the numbers are measured on, as JSON; neither names of hosts nor identifiers."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def driver_version() -> str | None:
    """Return the driver's version, or None where it does not say."""
    with contextlib.suppress(Exception):
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        finally:
            nvml.nvmlShutdown()
    return None


def nvcc_version() -> str | None:
    """Return the compiler's version, or None without one."""
    from comm_core.errors import CommError
    from comm_core.jit import toolchain

    try:
        return toolchain.find().version
    except CommError:
        return None


def facts() -> dict[str, Any]:
    """Return what this machine is."""
    torch: Any = importlib.import_module("torch")
    count = torch.cuda.device_count()
    found: dict[str, Any] = {"GPUs": count}
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "GPU": ", ".join(names),
            "compute capability": f"{properties.major}.{properties.minor}",
            "SMs": properties.multi_processor_count,
            "memory, GiB": round(properties.total_memory / 2**30),
            "driver": driver_version(),
        }
    if count > 1:
        pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
        found["peer access"] = all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    with contextlib.suppress(Exception):
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        **found,
        "CUDA of torch": torch.version.cuda,
        "nvcc": nvcc_version(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "CPU cores": len(os.sched_getaffinity(0)),
        "comm-core": importlib.import_module("comm_core._version").__version__,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts()), encoding="utf-8")
