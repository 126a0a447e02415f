"""The native kernels as a typed object: pointers in, nothing allocated here."""

from __future__ import annotations

import ctypes

import torch

from engine_core.platforms.cpu.build import load_kernels

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "pdmesh_attention": (_I, _P, _P, _P, _P, _P, _P, _P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _L, _L, _F, _I),
    "pdmesh_linear": (_I, _P, _L, _L, _I, _P, _P, _P, _P, _I),
    "pdmesh_gated": (_I, _P, _L, _L, _P, _P, _P, _P, _P, _L, _I),
    "pdmesh_norm": (_I, _P, _P, _P, _P, _L, _L, _F, _I),
    "pdmesh_rope": (_I, _P, _P, _P, _P, _L, _L, _L, _L, _I),
    "pdmesh_silu_mul": (_I, _P, _P, _L, _I),
    "pdmesh_sample": (_P, _L, _L, _P, _P, _P, _P, _P, _P, _L, _I),
    "pdmesh_score": (_P, _L, _L, _P, _L, _P, _P, _P, _P, _I),
}
IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
"""The kernels' name for a data type; other types are not theirs."""


class Kernels:
    """Functions of the compiled library. Raises NativeUnavailable when it can't be had."""

    def __init__(self) -> None:
        library = load_kernels()
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = None
        self.vector_length: int = library.pdmesh_vector_length()
        self.attention = library.pdmesh_attention
        self.linear = library.pdmesh_linear
        self.gated = library.pdmesh_gated
        self.norm = library.pdmesh_norm
        self.rope = library.pdmesh_rope
        self.silu_mul = library.pdmesh_silu_mul
        self.sample = library.pdmesh_sample
        self.score = library.pdmesh_score
