"""The cores and GPUs that runs may use and what memory is kept; without importing torch."""

import ctypes
import os
import subprocess
from pathlib import Path

__all__ = ["cores", "gpus", "keep_freed_memory"]


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


def keep_freed_memory() -> bool:
    """Lets this process keep the memory that it frees, for its next tensors.

    glibc gives large blocks back to the system, and each page that is handed out again costs a
    fault: a sixth of the seconds of FedMuon's rounds on ResNet-18. What is kept is in pieces, so
    that the process holds more than it needs at once, by a quarter in a trial of random sizes (by
    a half, were blocks of 32 MiB and more kept, too).

    Returns:
        Whether that was done: not under another C library, nor where the environment already says
        how malloc is to behave (``MALLOC_*``, or ``glibc.malloc`` in ``GLIBC_TUNABLES``).
    """
    said = any(name.startswith("MALLOC_") for name in os.environ)
    if said or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (others have a mallopt without these meanings)
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):
        return False
    trim_threshold, mmap_threshold = -1, -3
    # The first alone would be slower than nothing, as it ends glibc's own choice of the second.
    return bool(mallopt(mmap_threshold, 2**25) and mallopt(trim_threshold, 2**31 - 1))
