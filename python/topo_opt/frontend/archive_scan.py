"""Reads a `.pt2` with zipfile and json alone and refuses whatever is not on the list, before torch sees the file.

Loading such a file with torch runs code from it: pickles (sample inputs, weights, custom objects), size expressions and
guards, compiled libraries, names that end up in generated source, tree specs that import modules. What this scan returns
is enough to load the program without torch's own reader: the checked JSON, and where each tensor's bytes lie.
"""

import json
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from topo_opt.errors import InputError, UntrustedError
from topo_opt.frontend.archive_kind import RESAVE, check_kind, nesting
from topo_opt.frontend.archive_schema import Refused, check_payloads, check_program

# Numbers of torch.export's ScalarType -> torch name and bytes per element.
DTYPES: dict[int, tuple[str, int]] = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float16", 2),
    7: ("float32", 4),
    8: ("float64", 8),
    9: ("complex32", 4),
    10: ("complex64", 8),
    11: ("complex128", 16),
    12: ("bool", 1),
    13: ("bfloat16", 2),
    28: ("uint16", 2),
    29: ("float8_e4m3fn", 1),
    30: ("float8_e5m2", 1),
    31: ("float8_e4m3fnuz", 1),
    32: ("float8_e5m2fnuz", 1),
    33: ("float8_e8m0fnu", 1),
    34: ("uint32", 4),
    35: ("uint64", 8),
}
_STRIDED = 7
_SCHEMA_MAJOR = 8
_MODEL = r"[A-Za-z0-9_.\-]{1,128}"
# What torch.export.save writes; the group `pickle` is never opened.
_ENTRIES = re.compile(
    rf"models/{_MODEL}\.json|data/weights/{_MODEL}_weights_config\.json|data/constants/{_MODEL}_constants_config\.json"
    rf"|data/weights/weight_\d{{1,9}}|data/constants/tensor_\d{{1,9}}|(?P<pickle>data/sample_inputs/{_MODEL}\.pt)"
    r"|archive_format|archive_version|byteorder|version|\.data/version|\.data/serialization_id|\.format_version"
    r"|\.storage_alignment|extra/[A-Za-z0-9_.\-/]{1,255}"
)
_KNOWN_BAD = [
    (re.compile(r"data/aotinductor/"), "is a compiled library, which loading would run"),
    (re.compile(r"data/constants/(custom_obj|opaque_obj)_"), "is a pickled object, which loading would run"),
    (re.compile(r"serialized_\w+\.(pt|json)"), "is of the format before torch 2.8, which stores pickles"),
    (re.compile(r"data/(weights|constants)/.*\.pt"), "is a pickle of the format before torch 2.8"),
    (re.compile(r".*\.(so|py|pyc|pkl|dll|dylib)"), "is code"),
]
_TRUST = "if you trust where the file comes from, give --trust-model"
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


@dataclass(frozen=True)
class ScanLimits:
    """Sizes beyond which a file is refused."""

    entries: int = 200_000
    json_bytes: int = 1 << 30
    json_depth: int = 200
    total_bytes: int = 1 << 44
    compression_ratio: int = 200


@dataclass(frozen=True)
class Payload:
    """One tensor of the file.

    Args:
        name: its name in the state dict or among the constants.
        dtype: torch name ("bfloat16").
        shape, strides, storage_offset: in elements, over the entry's bytes.
        device: the device it was exported on ("cpu", "meta"...).
        entry: the archive entry that holds its storage; tied tensors share one.
        offset, nbytes: where the entry's bytes lie in the file. nbytes is 0 for a tensor without data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    is_param: bool
    requires_grad: bool
    device: str
    entry: str
    offset: int
    nbytes: int

    @property
    def absent(self) -> bool:
        """Whether the file holds no data for it (exported on the meta device, or with fake tensors)."""
        return self.nbytes == 0 and 0 not in self.shape


@dataclass(frozen=True)
class ModelInfo:
    """One exported program of the file: its checked JSON, state (parameters and buffers) and lifted constants."""

    name: str
    program: dict[str, Any] = field(repr=False)
    state: tuple[Payload, ...]
    constants: tuple[Payload, ...]


@dataclass(frozen=True)
class ArchiveInfo:
    """What a scan found. `models` is in the order of the file; nearly all files have one, named "model"."""

    path: Path
    file_bytes: int
    schema_version: tuple[int, int]
    torch_version: str
    models: tuple[ModelInfo, ...]


def scan(
    path: Path | str, *, limits: ScanLimits = ScanLimits(), extra_namespaces: frozenset[str] = frozenset()
) -> ArchiveInfo:
    """Checks the file at `path` and describes it.

    Args:
        limits: sizes beyond which the file is refused.
        extra_namespaces: `torch.ops` namespaces of custom operators that the caller trusts.

    Raises:
        InputError: not a `.pt2`, or a damaged one.
        UntrustedError: something in it is not on the list of what is safe to load; names the entry and the reason.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            check_kind(path, file)
            with zipfile.ZipFile(file) as archive:
                return _Scanner(path, file, archive, limits, extra_namespaces).scan()
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        struct.error,
        UnicodeDecodeError,
    ) as exc:
        raise InputError(f"{path} is a damaged .pt2: {_first_line(exc)}", hint=RESAVE) from exc
    except (RuntimeError, OverflowError, ValueError, MemoryError) as exc:
        # zipfile raises these for encrypted entries and impossible sizes.
        raise InputError(f"{path} is a damaged .pt2: {_first_line(exc)}", hint=RESAVE) from exc


def _unreadable(path: Path, exc: OSError) -> InputError:
    if path.is_dir():
        return InputError(f"{path} is a folder, not a .pt2 file")
    if not path.exists():
        return InputError(f"{path} does not exist")
    return InputError(f"{path} cannot be read: {exc.strerror or exc}")


def _first_line(exc: BaseException) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0]


class _Scanner:
    def __init__(
        self, path: Path, file: BinaryIO, archive: zipfile.ZipFile, limits: ScanLimits, extra: frozenset[str]
    ):
        self.path, self.file, self.archive, self.limits, self.extra = path, file, archive, limits, extra
        self.file_bytes = path.stat().st_size
        self.entries: dict[str, zipfile.ZipInfo] = {}

    def scan(self) -> ArchiveInfo:
        self.read_directory()
        if self.text("archive_format", "pt2") != "pt2":
            raise InputError(
                f"{self.path} is not a .pt2 but a {self.text('archive_format')[:20]!r} archive", hint=RESAVE
            )
        if self.text("archive_version", "0") != "0":
            raise InputError(
                f"{self.path} has archive version {self.text('archive_version')[:20]!r}, only 0 is known"
            )
        if self.text("byteorder", "little") != "little":
            raise InputError(f"{self.path} was written on a big-endian machine", hint=RESAVE)
        names = [name[len("models/") : -len(".json")] for name in self.entries if name.startswith("models/")]
        if not names:
            raise self.not_an_export()
        models = tuple(self.model(name) for name in names)
        program = models[0].program
        version = program["schema_version"]
        return ArchiveInfo(
            self.path,
            self.file_bytes,
            (version["major"], version["minor"]),
            program.get("torch_version", "unknown"),
            models,
        )

    def refuse(self, entry: str, reason: str) -> UntrustedError:
        return UntrustedError(f"{self.path}: the entry {entry!r:.200} {reason}", hint=_TRUST)

    def read_directory(self) -> None:
        """Fills `entries` (names without the root folder) and checks names, sizes and positions."""
        infos = self.archive.infolist()
        if len(infos) > self.limits.entries:
            raise self.refuse(infos[0].filename, f"is one of {len(infos)}, more than {self.limits.entries}")
        total = 0
        roots = {info.filename.split("/", 1)[0] for info in infos}
        if any("/code/" in f"/{info.filename}" or info.filename.endswith("/constants.pkl") for info in infos):
            raise InputError(f"{self.path} is a TorchScript file, not a .pt2", hint=RESAVE)
        if any(info.filename.endswith("/data.pkl") for info in infos):
            raise InputError(f"{self.path} is a torch.save file (a checkpoint), not a .pt2", hint=RESAVE)
        for info in infos:
            # First, so that an old or compiled file is named as what it is and not by its least telling entry.
            reason = _known_bad(info.filename.partition("/")[2]) or _known_bad(info.filename)
            if reason is not None:
                raise self.refuse(info.filename, reason)
        for info in infos:
            name = self.relative(info, roots)
            total += max(info.file_size, info.compress_size)
            if total > self.limits.total_bytes:
                raise self.refuse(info.filename, f"brings the archive beyond {self.limits.total_bytes} bytes")
            self.entries[name] = info
        self.check_overlap()

    def relative(self, info: zipfile.ZipInfo, roots: set[str]) -> str:
        full = info.filename
        if full != info.orig_filename or "\\" in full or full.startswith("/") or ".." in full.split("/"):
            raise self.refuse(info.orig_filename, "has a name that leaves the archive")
        root, _, name = full.partition("/")
        if not name or len(roots) != 1 or not root:
            raise self.refuse(full, "is not in the one folder that a .pt2 has")
        if name in self.entries:
            raise self.refuse(full, "is there twice")
        if not _ENTRIES.fullmatch(name):
            raise self.refuse(full, "is not one that torch.export writes")
        if info.flag_bits & 1:
            raise self.refuse(full, "is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self.refuse(full, "is compressed with an unknown method")
        if info.file_size > self.limits.compression_ratio * max(info.compress_size, 1):
            raise self.refuse(full, f"is compressed more than {self.limits.compression_ratio}:1")
        return name

    def check_overlap(self) -> None:
        """Every entry lies in the file, has one local header of its own name, and shares no bytes with another."""
        end = 0
        if self.entries and min(info.header_offset for info in self.entries.values()) != 0:
            raise InputError(
                f"{self.path} is a damaged .pt2: it has something before its first entry", hint=RESAVE
            )
        for info in sorted(self.entries.values(), key=lambda info: info.header_offset):
            start = self.data_offset(info)
            if info.header_offset < end:
                raise self.refuse(info.filename, "shares bytes with another")
            end = start + info.compress_size
            if end > self.file_bytes:
                raise InputError(f"{self.path} is a damaged .pt2: {info.filename} is cut off", hint=RESAVE)

    def data_offset(self, info: zipfile.ZipInfo) -> int:
        """Where the entry's bytes begin in the file."""
        self.file.seek(info.header_offset)
        header = self.file.read(_LOCAL_HEADER.size)
        magic, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        name = self.file.read(name_bytes)
        if magic != b"PK\x03\x04" or name != info.orig_filename.encode("utf-8"):
            raise self.refuse(info.filename, "has another name in its own header than in the directory")
        return info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes

    def text(self, name: str, default: str = "") -> str:
        info = self.entries.get(name)
        if info is None:
            return default
        if info.file_size > 1024:
            raise self.refuse(info.filename, "is too long")
        return self.archive.read(info).decode("utf-8").strip()

    def not_an_export(self) -> InputError:
        return InputError(f"{self.path} is a zip archive without an exported program", hint=RESAVE)

    def json(self, name: str) -> Any:
        """The entry as data: no duplicate keys, bounded depth and size."""
        info = self.entries.get(name)
        if info is None:
            raise InputError(f"{self.path} is a damaged .pt2: {name} is missing", hint=RESAVE)
        if info.file_size > self.limits.json_bytes:
            raise self.refuse(
                info.filename, f"has {info.file_size} bytes, more than {self.limits.json_bytes}"
            )
        raw = self.archive.read(info)
        if nesting(raw) > self.limits.json_depth:
            raise self.refuse(info.filename, f"is nested deeper than {self.limits.json_depth}")
        try:
            return json.loads(raw, object_pairs_hook=_unique)
        except Refused as exc:
            raise self.refuse(info.filename, exc.reason) from None
        except (ValueError, RecursionError) as exc:
            raise InputError(
                f"{self.path} is a damaged .pt2: {name} is not JSON: {_first_line(exc)}"
            ) from exc

    def model(self, name: str) -> ModelInfo:
        entry = f"models/{name}.json"
        program = self.json(entry)
        version = program.get("schema_version") if isinstance(program, dict) else None
        if isinstance(version, dict) and version.get("major") != _SCHEMA_MAJOR:
            written = str(program.get("torch_version", "unknown"))[:40]
            raise InputError(
                f"{self.path} has export schema {version.get('major')!r:.20} (written by torch {written}), "
                f"only {_SCHEMA_MAJOR} can be read",
                hint=RESAVE,
            )
        try:
            check_program(program, self.extra)
        except (Refused, RecursionError) as exc:
            raise self.refuse(entry, f"is refused: {exc}") from None
        state = self.payloads(f"data/weights/{name}_weights_config.json", "data/weights/")
        constants = self.payloads(f"data/constants/{name}_constants_config.json", "data/constants/")
        return ModelInfo(name, program, state, constants)

    def payloads(self, config: str, folder: str) -> tuple[Payload, ...]:
        document = self.json(config)
        try:
            check_payloads(document)
            return tuple(self.payload(name, meta, folder) for name, meta in document["config"].items())
        except Refused as exc:
            raise self.refuse(config, f"is refused: {exc}") from None

    def payload(self, name: str, meta: dict[str, Any], folder: str) -> Payload:
        tensor = meta["tensor_meta"]
        if meta["use_pickle"] or tensor is None:
            raise Refused(f"stores '{name}' as a pickle")
        if tensor["dtype"] not in DTYPES or tensor["layout"] != _STRIDED:
            raise Refused(f"has '{name}' with an unknown dtype or layout")
        entry = folder + meta["path_name"]
        info = self.entries.get(entry)
        if info is None:
            raise InputError(
                f"{self.path} is a damaged .pt2: {entry}, the data of '{name}', is missing", hint=RESAVE
            )
        if info.compress_type != zipfile.ZIP_STORED:
            raise InputError(f"{self.path}: {entry} is compressed, so it cannot be mapped", hint=RESAVE)
        dtype, itemsize = DTYPES[tensor["dtype"]]
        shape, strides = (tuple(_number(size, name) for size in tensor[key]) for key in ("sizes", "strides"))
        start = _number(tensor["storage_offset"], name)
        if len(shape) != len(strides) or len(shape) > 64:
            raise Refused(f"has '{name}' with {len(shape)} sizes and {len(strides)} strides")
        device = tensor["device"]["type"]
        last = (
            start + sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in shape else -1
        )
        absent = info.file_size == 0
        if absent and last >= 0 and device != "meta" and not self.everything_is_empty(folder):
            raise InputError(
                f"{self.path} is a damaged .pt2: {entry}, the data of '{name}', is empty", hint=RESAVE
            )
        if not absent and (last + 1) * itemsize > info.file_size:
            raise Refused(f"has '{name}' reaching beyond its {info.file_size} bytes")
        return Payload(
            name,
            dtype,
            shape,
            strides,
            start,
            meta["is_param"],
            tensor["requires_grad"],
            device,
            entry,
            self.data_offset(info),
            info.file_size,
        )

    def everything_is_empty(self, folder: str) -> bool:
        """Whether no tensor there has data, as after an export with fake tensors of a real device."""
        return not any(
            info.file_size for name, info in self.entries.items() if re.match(rf"{folder}\w+_\d", name)
        )


def _known_bad(name: str) -> str | None:
    return next((reason for pattern, reason in _KNOWN_BAD if pattern.match(name)), None)


def _number(size: dict[str, Any], name: str) -> int:
    value = size.get("as_int")
    if value is None or value < 0 or value >= 1 << 62:
        raise Refused(f"has '{name}' with a size that is not a number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise Refused("has an object with the same key twice")
    return result
