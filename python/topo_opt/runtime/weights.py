"""Weights of a bundle: byte ranges of files, mapped when they are asked for.

`weights.json` says where each tensor lies: in `weights.safetensors` beside it, in the archive the model was compiled from,
or nowhere (a model exported without data). Nothing is unpickled, and no range leaves its file.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from topo_opt.errors import InputError, UntrustedError
from topo_opt.runtime.weight_files import WeightFile, check_place, locate

TABLE = "weights.json"
PACKED = "weights.safetensors"
VERSION = 1
_MAX_TABLE_BYTES = 1 << 28


@dataclass(frozen=True)
class Part:
    """(first, count) along every dimension of a tensor of the shape `of_shape`."""

    box: tuple[tuple[int, int], ...]
    of_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(count for _, count in self.box)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, a view; all of a tensor of another shape."""
        if tuple(tensor.shape) != self.of_shape:
            return tensor
        for dim, (first, count) in enumerate(self.box):
            tensor = tensor.narrow(dim, first, count)
        return tensor


@dataclass(frozen=True)
class TensorRange:
    """One tensor: `nbytes` bytes at `offset` of file number `file` (None: no data), seen through shape and strides.

    shape, strides and storage_offset count elements. Tensors with the same range share memory (tied weights).
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int = 0
    file: int | None = None
    offset: int = 0
    nbytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """The entry of `weights.json`."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "storage_offset": self.storage_offset,
            "file": self.file,
            "offset": self.offset,
            "nbytes": self.nbytes,
        }


def table_json(files: list[WeightFile], tensors: Mapping[str, TensorRange]) -> dict[str, Any]:
    """The content of `weights.json`."""
    entries = {name: tensors[name].to_json() for name in sorted(tensors)}
    return {"version": VERSION, "files": [file.to_json() for file in files], "tensors": entries}


class Weights(Mapping[str, torch.Tensor]):
    """Tensors of a bundle by name, on the CPU, mapped from their files.

    Tensors are views of private mappings: writing to one changes no file, but shows in tensors tied to it.
    """

    def __init__(
        self,
        folder: Path,
        files: Sequence[WeightFile],
        ranges: Mapping[str, TensorRange],
        *,
        moved: Path | None = None,
        named: "NamedTensors | None" = None,
    ):
        """`moved` is where the archives are now; `named` has tensors that take precedence."""
        self._folder, self._files, self.ranges = folder, files, dict(ranges)
        self._moved, self._named = moved, named
        self._maps: dict[int, mmap.mmap] = {}
        self._regions: dict[tuple[int, int, int, str], torch.Tensor] = {}

    @classmethod
    def open(cls, folder: Path | str, *, source: Path | str | None = None) -> "Weights":
        """The weights of the bundle in `folder`.

        Args:
            source: where the archive is now, when it has moved, or the folder of several; or a `.safetensors` file, or a folder
                of such files, whose tensors are taken by name before the bundle's own (for models exported without data, or
                for other weights of the same shapes).

        Raises:
            InputError: a file is missing, has changed, or is too short for its tensors.
            UntrustedError: the table is malformed or leads outside its files.
        """
        folder, given = Path(folder), None if source is None else Path(source)
        table, packed = folder / TABLE, folder / PACKED
        files, ranges = _read_table(table) if table.exists() else ([], {})
        by_name = given is not None and (
            given.suffix == ".safetensors" or (given.is_dir() and any(given.glob("*.safetensors")))
        )
        if given is not None and not by_name:
            check_place(given, files)
        named = NamedTensors(given) if given is not None and by_name else None
        if named is None and not table.exists() and packed.exists():
            named = NamedTensors(packed)
        return cls(folder, files, ranges, moved=None if by_name else given, named=named)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.ranges, **dict.fromkeys(self._named or ())})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def fetch(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """The tensor, or None when the bundle does not have it or only knows its shape.

        Args:
            part: only what is asked for is read.
        """
        if self._named is not None and name in self._named:
            return self._named.part(name, part)
        entry = self.ranges.get(name)
        if entry is None or _absent(entry):
            return None
        # A view of the file: pages are read when they are touched.
        return self[name] if part is None else part.of(self[name])

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._named is not None and name in self._named:
            return self._named[name]
        entry = self.ranges[name]
        if _absent(entry):
            raise InputError(
                f"the weight {name} ({entry.dtype}{list(entry.shape)}) has no data: the model was exported without it",
                hint="name a safetensors file that has it, or ask for random weights",
            )
        dtype = getattr(torch, entry.dtype)
        if entry.file is None:
            return torch.empty(entry.shape, dtype=dtype)
        region = self._region(entry.file, entry.offset, entry.nbytes, dtype)
        return region.as_strided(entry.shape, entry.strides, entry.storage_offset)

    def _region(self, file: int, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The flat tensor over a byte range; the same range gives the same memory.

        Each range is a storage of its own: torch takes tensors of one storage for views of each other, and a model whose
        mutated buffers are views of one base compiles to something else.
        """
        key = (file, offset, nbytes, str(dtype))
        if key not in self._regions:
            if nbytes == 0:
                return torch.empty(0, dtype=dtype)
            raw = torch.frombuffer(self._mapped(file), dtype=torch.uint8, count=nbytes, offset=offset)
            if dtype == torch.bool:
                self._regions[key] = raw != 0  # a byte other than 0 and 1 is no valid bool
            else:
                aligned = raw if offset % dtype.itemsize == 0 else raw.clone()
                self._regions[key] = aligned.view(dtype)
        return self._regions[key]

    def _mapped(self, number: int) -> mmap.mmap:
        if number not in self._maps:
            file = self._files[number]
            self._maps[number] = _map(locate(file, self._folder, self._moved, self._files))
        return self._maps[number]


class NamedTensors(Mapping[str, torch.Tensor]):
    """Tensors of a safetensors file, or of all such files of a folder, by name."""

    def __init__(self, path: Path):
        from safetensors import SafetensorError, safe_open

        paths = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not paths:
            raise InputError(f"the folder {path} has no .safetensors file")
        self._where: dict[str, Any] = {}
        for one in paths:
            try:
                handle = safe_open(str(one), framework="pt", device="cpu")
            except (OSError, SafetensorError) as exc:
                raise InputError(f"the weight file {one} cannot be read: {exc}") from None
            for name in handle.keys():  # noqa: SIM118, not a mapping
                self._where[name] = handle

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name].get_tensor(name)

    def part(self, name: str, part: Part | None) -> torch.Tensor:
        """A part of a tensor, of which nothing else is read; all of it where it is not of that shape, or without a part."""
        if part is None:
            return self[name]
        view = self._where[name].get_slice(name)
        if tuple(view.get_shape()) != part.of_shape:
            return self[name]
        return view[tuple(slice(first, first + count) for first, count in part.box)]


def _absent(entry: TensorRange) -> bool:
    return entry.file is None and math.prod(entry.shape) > 0


def _map(path: Path) -> mmap.mmap:
    """A private mapping: pages are read when they are touched, and writing to them leaves the file as it is."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as exc:
        raise InputError(f"the weight file {path} cannot be mapped: {exc}") from None


def _read_table(path: Path) -> tuple[list[WeightFile], dict[str, TensorRange]]:
    if path.stat().st_size > _MAX_TABLE_BYTES:
        raise UntrustedError(f"{path} is larger than {_MAX_TABLE_BYTES} bytes")
    try:
        document = json.loads(path.read_bytes())
        if document["version"] != VERSION:
            raise InputError(f"{path} has version {document['version']!r:.20}, this runtime reads {VERSION}")
        files = [_file(entry) for entry in document["files"]]
        return files, {str(name): _range(entry, files) for name, entry in document["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise UntrustedError(f"{path} is malformed: {type(exc).__name__} {exc}") from None


def _file(entry: dict[str, Any]) -> WeightFile:
    file = WeightFile(entry["path"], _count(entry["bytes"]), entry["fingerprint"])
    if not isinstance(file.path, str) or not isinstance(file.fingerprint, str | None):
        raise ValueError("a file entry has wrong types")
    if file.fingerprint is None and file.path != PACKED:
        # Only a file known by its fingerprint may lie outside the bundle.
        raise ValueError(f"{file.path!r} is not a file of the bundle")
    return file


def _range(entry: dict[str, Any], files: list[WeightFile]) -> TensorRange:
    shape, strides = (tuple(_count(size) for size in entry[key]) for key in ("shape", "strides"))
    number, offset, nbytes = entry["file"], _count(entry["offset"]), _count(entry["nbytes"])
    dtype = getattr(torch, str(entry["dtype"]), None)
    start = _count(entry["storage_offset"])
    if not isinstance(dtype, torch.dtype) or len(shape) != len(strides) or len(shape) > 64:
        raise ValueError("a tensor has a wrong dtype or strides")
    if number is not None:
        if _count(number) >= len(files) or offset + nbytes > files[number].bytes or nbytes % dtype.itemsize:
            raise ValueError("a tensor leaves its file")
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides))
        if 0 not in shape and (last + 1) * dtype.itemsize > nbytes:
            raise ValueError("a tensor leaves its bytes")
    return TensorRange(str(entry["dtype"]), shape, strides, start, number, offset, nbytes)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r:.40} is not a size")
    return value
