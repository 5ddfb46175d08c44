"""The cores and GPUs that runs may use, asked without importing torch, which takes seconds."""

import os
import subprocess
from pathlib import Path

__all__ = ["cores", "gpus"]


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpus() -> list[str]:
    """The NVIDIA GPUs that this process may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    there = Path("/proc/driver/nvidia/gpus")
    if there.is_dir():
        return [str(i) for i in range(len(list(there.iterdir())))]
    try:  # WSL2 and some containers
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = listed.stdout.splitlines() if listed.returncode == 0 else []
    return [str(i) for i in range(sum(line.startswith("GPU ") for line in lines))]
