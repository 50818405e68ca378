"""Where tensors lie, and whether kernels can use them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""A subclass may mean anything by its memory."""
POINTER_ALIGNMENT = 16
"""Bytes: what kernels are compiled for, and tensor descriptors need."""


def readable(tensor: torch.Tensor, place: int) -> bool:
    """Whether kernels on the device with index `place` (-1: the CPU) can use the memory of a tensor as it lies."""
    return (
        type(tensor) in _PLAIN
        and tensor.get_device() == place
        and tensor.is_contiguous()
        and not tensor.data_ptr() % POINTER_ALIGNMENT
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and one past the last byte of a contiguous tensor."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def overlaps(tensor: torch.Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a contiguous tensor shares memory with one of the spans."""
    start, end = span(tensor)
    return any(start < last and first < end for first, last in spans)
