"""Linear layers on the native kernels: few rows stream each weight once, many rows go to torch.

The weights stay where the loader mapped them, in the checkpoint's order: nothing is packed or copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine_core.platforms.base import DeviceOps
from engine_core.platforms.cpu.kernels import IS_BF16, Kernels
from models.layers.linear import Linear, LinearGroup, Parameter, TorchLinear

MAX_ROWS = 32
"""Above this many rows a matrix product has work enough for torch's own to win."""


class NativeLinear:
    """Implements LinearBackend. Raises NativeUnavailable where the kernels can't be had."""

    def __init__(self) -> None:
        self._kernels = Kernels()
        self._torch = TorchLinear()

    def _takes(self, parameters: Sequence[Parameter]) -> bool:
        """True when the kernels can compute with these, now and at every call."""
        width, dtype = parameters[0][0].shape[1], parameters[0][0].dtype
        return dtype in IS_BF16 and all(
            w.is_contiguous() and w.dtype == dtype and w.shape[1] == width
            and width % self._kernels.vector_length == 0
            for w, _ in parameters
        )  # fmt: skip

    def single(self, parameter: Parameter) -> Linear:
        if not self._takes([parameter]):
            return self._torch.single(parameter)
        run = self._group([parameter])
        return lambda x: run(x)[0]

    def group(self, parameters: Sequence[Parameter]) -> LinearGroup:
        return self._group(parameters) if self._takes(parameters) else self._torch.group(parameters)

    def gated(self, gate: Parameter, up: Parameter, ops: DeviceOps) -> Linear:
        if not self._takes([gate, up]) or gate[0].shape != up[0].shape:
            return self._torch.gated(gate, up, ops)
        many = self._torch.gated(gate, up, ops)
        kernel, kind, (out_width, width) = self._kernels.gated, IS_BF16[gate[0].dtype], gate[0].shape
        pointers = [p if p is None else p.data_ptr() for p in (*gate, *up)]

        def run(x: torch.Tensor) -> torch.Tensor:
            rows = x.shape[0]
            if rows > MAX_ROWS or not x.is_contiguous():
                return many(x)
            out = torch.empty(rows, out_width, dtype=x.dtype)
            kernel(kind, x.data_ptr(), rows, width, *pointers, out.data_ptr(), out_width, torch.get_num_threads())
            return out

        return run

    def _group(self, parameters: Sequence[Parameter]) -> LinearGroup:
        pairs = tuple(parameters)
        count, width = len(pairs), pairs[0][0].shape[1]
        kernel, kind = self._kernels.linear, IS_BF16[pairs[0][0].dtype]
        array = ctypes.c_void_p * count
        weights = array(*(w.data_ptr() for w, _ in pairs))
        biases = array(*(None if b is None else b.data_ptr() for _, b in pairs))
        sizes = (ctypes.c_int64 * count)(*(w.shape[0] for w, _ in pairs))
        widths = tuple(w.shape[0] for w, _ in pairs)

        def run(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rows = x.shape[0]
            if rows > MAX_ROWS or not x.is_contiguous():
                return tuple(F.linear(x, weight, bias) for weight, bias in pairs)
            outs = tuple(torch.empty(rows, n, dtype=x.dtype) for n in widths)
            kernel(kind, x.data_ptr(), rows, width, count, weights, biases, array(*(o.data_ptr() for o in outs)), sizes,
                   torch.get_num_threads())  # fmt: skip
            return outs

        return run
