"""The CPU platform: host memory, OpenMP threads, C++ kernels that are compiled where they run."""

from engine_core.platforms.cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]
