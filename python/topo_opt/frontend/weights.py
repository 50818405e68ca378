"""Where the weights of a model are, as data for the bundle. The compiler itself never reads them.

Weights of a `.pt2` stay in it: the bundle refers to byte ranges of the archive. Weights in memory, or those of an archive on
request, are packed once into a safetensors file. Weights on the meta device are absent: only their shapes are recorded.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from topo_opt.errors import InputError
from topo_opt.frontend.archive_scan import ArchiveInfo, Payload
from topo_opt.runtime.weight_files import WeightFile, fingerprint
from topo_opt.runtime.weights import PACKED, TensorRange, table_json

_ALIGNMENT = 64
_CHUNK_BYTES = 64 << 20
# Names of the safetensors format; a dtype it lacks is written as bytes, its true type is in the table.
_SAFETENSORS = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


_FROM_ONE_MODEL = "functions of one bundle share their weights by name: export them from one model"
_COMPARED_BYTES = 1 << 22
"""Of two files at a time."""


@dataclass(frozen=True)
class WeightSource:
    """How a bundle gets its weights: the content of `weights.json`, and who writes `weights.safetensors` (None: nobody)."""

    table: dict[str, Any]
    writer: Callable[[Path], None] | None = None

    @property
    def absent(self) -> list[str]:
        """Names of tensors without data anywhere."""
        tensors = self.table["tensors"].items()
        return [name for name, entry in tensors if entry["file"] is None and math.prod(entry["shape"]) > 0]


def reference(archives: Mapping[str, ArchiveInfo], bundle: Path) -> WeightSource:
    """Leaves the weights in the archives. Those that several archives hold are compared.

    Args:
        archives: function name -> scan of its archive; functions may share one, and share weights by name.
        bundle: the folder the bundle will have, which paths are relative to.

    Raises:
        InputError: two archives disagree about the shape, the dtype or the value of a weight.
    """
    files: list[WeightFile] = []
    numbers: dict[Path, int] = {}
    tensors: dict[str, tuple[TensorRange, Payload, Path]] = {}
    for info in archives.values():
        path = info.path.resolve()
        if path not in numbers:
            numbers[path] = len(files)
            files.append(
                WeightFile(os.path.relpath(path, bundle.resolve()), info.file_bytes, fingerprint(path))
            )
        model = info.models[0]
        for payload in (*model.state, *model.constants):
            file = None if payload.nbytes == 0 else numbers[path]
            entry = TensorRange(
                payload.dtype,
                payload.shape,
                payload.strides,
                payload.storage_offset,
                file,
                payload.offset,
                payload.nbytes,
            )
            known = tensors.setdefault(payload.name, (entry, payload, path))
            if known[2] != path:
                _check_same(payload, path, *known[1:], constant=payload in model.constants)
    return WeightSource(table_json(files, {name: entry for name, (entry, _, _) in tensors.items()}))


def _check_same(payload: Payload, path: Path, other: Payload, other_path: Path, *, constant: bool) -> None:
    if (payload.dtype, payload.shape) != (other.dtype, other.shape):
        raise InputError(
            f"{payload.name} is {payload.dtype}{list(payload.shape)} in {path.name} and "
            f"{other.dtype}{list(other.shape)} in {other_path.name}",
            hint=_FROM_ONE_MODEL,
        )
    if not _has_same_bytes(path, payload, other_path, other):
        what = f"the constant {payload.name}" if constant else payload.name
        raise InputError(
            f"{what} has one value in {path.name} and another in {other_path.name}",
            hint="register it as a buffer with a name of its own" if constant else _FROM_ONE_MODEL,
        )


def _has_same_bytes(path: Path, payload: Payload, other_path: Path, other: Payload) -> bool:
    """Whether two weights lie in their files alike and hold the same."""
    if (payload.strides, payload.storage_offset, payload.nbytes) != (
        other.strides,
        other.storage_offset,
        other.nbytes,
    ):
        return False
    with path.open("rb") as first, other_path.open("rb") as second:
        first.seek(payload.offset)
        second.seek(other.offset)
        left = payload.nbytes
        while left > 0:
            size = min(left, _COMPARED_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def program_tensors(programs: Mapping[str, ExportedProgram]) -> dict[str, torch.Tensor]:
    """Parameters, buffers and lifted constants of the programs by name; functions share them.

    Raises:
        InputError: two functions disagree about one.
    """
    found: dict[str, torch.Tensor] = {}
    for function, program in programs.items():
        for name, value in (*program.constants.items(), *program.state_dict.items()):
            if not isinstance(value, torch.Tensor):
                continue
            known = found.setdefault(name, value)
            if (known.dtype, known.shape) != (value.dtype, value.shape):
                raise InputError(
                    f"{name} of '{function}' is {value.dtype} {list(value.shape)}, elsewhere {known.dtype} "
                    f"{list(known.shape)}",
                    hint=_FROM_ONE_MODEL,
                )
            is_constant = name not in program.state_dict
            if _has_data(value) and _has_data(known) and not _equal(known, value):
                raise InputError(
                    f"{'the constant ' if is_constant else ''}{name} of '{function}' has another value elsewhere",
                    hint="register it as a buffer with a name of its own" if is_constant else _FROM_ONE_MODEL,
                )
    return found


def pack(tensors: Mapping[str, torch.Tensor]) -> WeightSource:
    """Copies tensors into the bundle, tied ones once. Meta and fake tensors are absent."""
    owners: dict[tuple, str] = {}
    header: dict[str, Any] = {}
    ranges: dict[str, TensorRange] = {}
    sources: list[tuple[int, torch.Tensor]] = []
    end = 0
    # Wide elements first: every tensor then lies at a multiple of its element size, as safetensors does it too.
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        value = tensors[name].detach()
        dtype = str(value.dtype).removeprefix("torch.")
        shape, strides = tuple(value.shape), _dense_strides(value)
        if not _has_data(value) or value.numel() == 0:
            ranges[name] = TensorRange(dtype, shape, strides)
            continue
        key = (value.device, value.data_ptr(), value.dtype, shape, tuple(value.stride()))
        if key in owners:
            ranges[name] = ranges[owners[key]]
            continue
        owners[key] = name
        nbytes = value.numel() * value.itemsize
        ranges[name] = TensorRange(dtype, shape, strides, 0, 0, end, nbytes)
        sources.append((end, value))
        known = dtype in _SAFETENSORS and value.is_contiguous()
        header[name] = {
            "dtype": _SAFETENSORS[dtype] if known else "U8",
            "shape": list(shape) if known else [nbytes],
            "data_offsets": [end, end + nbytes],
        }
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = len(text) + 8
    placed = {name: _moved(entry, start) for name, entry in ranges.items()}
    table = table_json([WeightFile(PACKED, start + end)] if sources else [], placed)
    if not sources:
        return WeightSource(table)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, value in sources:
                for piece in _pieces(value):
                    file.write(piece)

    return WeightSource(table, write)


def _dense_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides the packed copy has: the tensor's own if it has no gaps or overlaps, else contiguous ones."""
    order = sorted(range(value.dim()), key=lambda d: (value.stride(d), value.shape[d]))
    expected = 1
    for dim in order:
        if value.shape[dim] != 1 and value.stride(dim) != expected:
            return tuple(torch.empty(value.shape, device="meta").stride())
        expected *= value.shape[dim]
    return tuple(value.stride())


def _pieces(value: torch.Tensor):  # type: ignore[no-untyped-def]
    """The bytes of a tensor in the order of `_dense_strides`, a bounded amount at a time."""
    strides = _dense_strides(value)
    flat = value.as_strided((value.numel(),), (1,)) if strides == tuple(value.stride()) else value.reshape(-1)
    step = max(1, _CHUNK_BYTES // value.itemsize)
    for start in range(0, value.numel(), step):
        yield flat[start : start + step].cpu().contiguous().view(torch.uint8).numpy().data


def _moved(entry: TensorRange, start: int) -> TensorRange:
    if entry.file is None:
        return entry
    fields = (entry.dtype, entry.shape, entry.strides, entry.storage_offset, entry.file)
    return TensorRange(*fields, entry.offset + start, entry.nbytes)


def _has_data(value: torch.Tensor) -> bool:
    return not isinstance(value, FakeTensor) and value.device.type != "meta"


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (
        left.data_ptr() == right.data_ptr()
        and left.stride() == right.stride()
        and left.device == right.device
    ):
        return True
    a, b = (value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for value in (left, right))
    return torch.equal(a, b)
