"""Checked access to a checkpoint's tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from engine_core.types.errors import ConfigError


class WeightTable:
    """The tensors that a model asked for, in its compute data type.

    Where the checkpoint already has that type they stay views of the file. Raises ConfigError for a
    missing tensor or one of another shape; what was not asked for is left alone.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        weights: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name not in shapes:
                continue
            if tuple(tensor.shape) != shapes[name]:
                raise ConfigError(f"tensor {name} has shape {list(tensor.shape)}; it must be {list(shapes[name])}")
            self._tensors[name] = tensor.to(dtype)
        missing = [name for name in shapes if name not in self._tensors]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise ConfigError(f"the checkpoint lacks tensor {missing[0]}{more}")

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        return self._tensors[name]

    def parameter(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight, bias or None) of a linear layer."""
        return self._tensors[prefix + ".weight"], self._tensors.get(prefix + ".bias")
