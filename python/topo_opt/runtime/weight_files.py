"""Files with weights: how a bundle knows one that is not part of it, and finding it again."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topo_opt.errors import InputError

_FINGERPRINT_HEAD = 1 << 16
_FINGERPRINT_TAIL = 1 << 20
_SHOWN = 12  # hex digits of a fingerprint in messages


class WeightFileMissing(InputError):
    """A file that a bundle refers to is not there."""


@dataclass(frozen=True)
class WeightFile:
    """A file with tensors. `path` is relative to the bundle; `fingerprint` identifies a file that is not part of it."""

    path: str
    bytes: int
    fingerprint: str | None = None

    @property
    def name(self) -> str:
        """The last part of its path."""
        return Path(self.path).name

    def to_json(self) -> dict[str, Any]:
        """The entry of `weights.json`."""
        return {"path": self.path, "bytes": self.bytes, "fingerprint": self.fingerprint}


def fingerprint(path: Path) -> str:
    """SHA-256 over the size, the beginning and the end of a file.

    The end of a `.pt2` is its directory, which has a checksum of every entry, so a changed weight changes it.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_FINGERPRINT_HEAD))
        file.seek(max(0, size - _FINGERPRINT_TAIL))
        digest.update(file.read(_FINGERPRINT_TAIL))
    return digest.hexdigest()


def referred(files: Sequence[WeightFile]) -> list[WeightFile]:
    """Those that are not part of the bundle."""
    return [file for file in files if file.fingerprint is not None]


def check_place(place: Path, files: Sequence[WeightFile]) -> None:
    """Checks a place that a user names for the archives that a bundle refers to.

    Raises:
        InputError: it is not there, the bundle refers to no archive, or it is a folder without any of them.
    """
    if not place.exists():
        raise InputError(
            f"{place}, named as the place of the weights, is not there",
            hint="name a safetensors file, a folder of them, or where the model archive is now",
        )
    names = [file.name for file in referred(files)]
    if place.is_dir():
        if not any((place / name).exists() for name in names):
            also = f", nor {' or '.join(names)}" if names else ""
            raise InputError(f"the folder {place} has no .safetensors file{also}")
    elif not names:
        raise InputError(
            f"{place} is named as the place of a model archive, and the bundle refers to none: it has weights of its own or none",
            hint="name a safetensors file or a folder of them",
        )


def locate(file: WeightFile, folder: Path, place: Path | None, files: Sequence[WeightFile]) -> Path:
    """The path of a weight file that is there, has its size, and is the one that the bundle was made with.

    Args:
        folder: of the bundle.
        place: where the archives are now: one of them, or the folder that has them under their names.
        files: all weight files of the bundle.

    Raises:
        WeightFileMissing: it is not there.
        InputError: it is another file.
    """
    path = _path(file, folder, place, files)
    try:
        size = path.stat().st_size
        found = fingerprint(path) if file.fingerprint is not None and size == file.bytes else None
    except OSError as error:
        raise WeightFileMissing(
            f"the weight file {_absolute(path)} cannot be read: {error.strerror}; the bundle {folder} takes its weights from that "
            f"file of {file.bytes} bytes",
            hint=_hint(file, "was it moved, or the bundle?"),
        ) from None
    if size != file.bytes:
        raise InputError(
            f"the weight file {_absolute(path)} has {size} bytes, the bundle {folder} was made with one of {file.bytes}",
            hint=_hint(file, "has it been written again?"),
        )
    if found != file.fingerprint:
        raise InputError(
            f"the weight file {_absolute(path)} is not the one the bundle {folder} was compiled from: its fingerprint is "
            f"{str(found)[:_SHOWN]}..., expected {str(file.fingerprint)[:_SHOWN]}...",
            hint=_hint(file, "has it been written again?"),
        )
    return path


def _path(file: WeightFile, folder: Path, place: Path | None, files: Sequence[WeightFile]) -> Path:
    if file.fingerprint is None or place is None:
        return folder / file.path
    if place.is_dir():
        return place / file.name
    # One file for several functions' archives: it is the one of its name.
    alone = len(referred(files)) == 1
    return place if alone or place.name == file.name else folder / file.path


def _absolute(path: Path) -> Path:
    return path.resolve()


def _hint(file: WeightFile, question: str) -> str:
    if file.fingerprint is None:
        return f"{question} a bundle is copied as a whole folder; or compile the model again"
    return f"{question} say where {file.name} is (--weights PATH, weights=PATH), or compile the model again"
