"""Opens a bundle folder: everything is hashed and checked before anything of it is used.

A bundle is data from somewhere else. Its folder may hold exactly the files of its manifest, each a plain file (no links)
under a relative path on a short list of places, of the stated size and sha256.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from topo_opt.errors import InputError, UntrustedError
from topo_opt.runtime import strict_json
from topo_opt.runtime.plan import Plan
from topo_opt.runtime.plan_check import from_json
from topo_opt.runtime.pytree import check_tree
from topo_opt.runtime.strict_json import Json

MANIFEST = "manifest.json"
FORMAT = "topo-opt bundle"
SCHEMA = 1
MAX_FILES = 100_000
MAX_TEXT_BYTES = 1 << 30
"""Cap for JSON, kernel and IR files, which are read into memory."""
MAX_MANIFEST_BYTES = 64 << 20
PLACES = re.compile(
    r"(plan|aten|report|tuning|weights)\.json|(weights|constants)\.safetensors|report\.html"
    r"|kernels/[A-Za-z_][A-Za-z0-9_]*\.py|ir/[A-Za-z0-9_][A-Za-z0-9_.-]*\.mlir"
)
_CHUNK = 8 << 20
_REPAIR = "was it moved or changed? copy the bundle again as a whole folder, or compile the model again"


@dataclass(frozen=True)
class FileEntry:
    """One file of the manifest."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """manifest.json: `format` and `schema` first, so that other versions can say what is wrong."""

    format: str
    schema: int
    tools: dict[str, str]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Bundle:
    """A verified bundle. Text files are kept as the bytes that were hashed; large files by path."""

    path: Path
    manifest: Manifest
    plan: Plan
    texts: dict[str, bytes]

    @property
    def files(self) -> tuple[str, ...]:
        """Relative paths of all files but the manifest."""
        return tuple(self.manifest.files)

    def has(self, name: str) -> bool:
        """Whether the bundle has the file `name`."""
        return name in self.manifest.files

    def json(self, name: str) -> Json:
        """A JSON file of the bundle, parsed; None when it is absent."""
        return strict_json.parse(self.texts[name], name) if name in self.texts else None

    def file(self, name: str) -> Path:
        """The path of a file that was verified."""
        if name not in self.manifest.files:
            raise InputError(f"the bundle {self.path} has no {name}")
        return self.path / name


def open_bundle(path: str | Path, *, verify_weights: bool = True) -> Bundle:
    """Opens and verifies the bundle folder `path`.

    Args:
        verify_weights: hash `*.safetensors` too; without it only their sizes are compared (for very large models on
            storage that is trusted).

    Raises:
        InputError: there is no bundle at `path`.
        UntrustedError: the bundle is damaged, or holds what a bundle may not hold.
    """
    path = Path(path)
    root = _open_folder(path)
    try:
        manifest = _read_manifest(root, path)
        found = dict(_walk(root, ""))
        _compare_listing(manifest, found, path)
        texts: dict[str, bytes] = {}
        for name, entry in manifest.files.items():
            heavy = name.endswith(".safetensors")
            if heavy and not verify_weights:
                continue
            data = _verify(root, path, name, entry, keep=not heavy)
            if data is not None:
                texts[name] = data
    except OSError as error:
        raise InputError(f"the bundle {path} can't be read: {error.strerror}: {error.filename}") from None
    finally:
        os.close(root)
    if "plan.json" not in texts:
        raise UntrustedError(f"the bundle {path} has no plan.json")
    plan = from_json(strict_json.parse(texts["plan.json"], "plan.json"))
    _check_against_plan(plan, manifest)
    return Bundle(path, manifest, plan, texts)


def verify_weight_files(bundle: Bundle) -> None:
    """Hashes what `open_bundle` leaves out without `verify_weights`.

    Raises:
        UntrustedError: a file is not the one that the manifest describes.
    """
    heavy = {name: e for name, e in bundle.manifest.files.items() if name.endswith(".safetensors")}
    if not heavy:
        return
    root = _open_folder(bundle.path)
    try:
        for name, entry in heavy.items():
            _verify(root, bundle.path, name, entry, keep=False)
    except OSError as error:
        raise InputError(
            f"the bundle {bundle.path} can't be read: {error.strerror}: {error.filename}"
        ) from None
    finally:
        os.close(root)


def is_bundle(path: Path) -> bool:
    """Whether `path` looks like a bundle folder (its manifest says so); nothing is verified."""
    try:
        with open(path / MANIFEST, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    return f'"format": "{FORMAT}"'.encode() in head


def _open_folder(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(
            f"there is no bundle at {path}", hint="topo-opt MODEL.pt2 -o FOLDER makes one"
        ) from None
    except OSError as error:
        raise InputError(f"{path} is not a bundle folder: {error.strerror}") from None


def _read_manifest(root: int, path: Path) -> Manifest:
    try:
        data = _read(root, MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise InputError(f"{path} is not a bundle: it has no {MANIFEST}") from None
    value = strict_json.parse(data, MANIFEST)
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UntrustedError(f"{path}/{MANIFEST} is not the manifest of a topo-opt bundle")
    if value.get("schema") != SCHEMA:
        raise UntrustedError(
            f"the bundle {path} has schema {value.get('schema')!r}, this version reads schema {SCHEMA}",
            hint="compile the model again with this version of topo-opt",
        )
    manifest = strict_json.decode(Manifest, value, "manifest")
    for name, entry in manifest.files.items():
        if not PLACES.fullmatch(name):
            raise UntrustedError(f"the manifest lists {name[:80]!r}, which has no place in a bundle")
        if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256) or not 0 <= entry.size < 1 << 46:
            raise UntrustedError(f"the manifest entry of {name} is malformed")
        if not name.endswith(".safetensors") and entry.size > MAX_TEXT_BYTES:
            raise UntrustedError(
                f"{name} is {entry.size} bytes, text files of a bundle may have {MAX_TEXT_BYTES}"
            )
    return manifest


def _walk(root: int, prefix: str) -> Iterator[tuple[str, int]]:
    """Every file under the open folder with its size; refuses links, devices and deep folders."""
    count = 0
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            name, info = prefix + entry.name, entry.stat(follow_symlinks=False)
            if (count := count + 1) > MAX_FILES:
                raise UntrustedError("the bundle has too many files")
            if stat.S_ISDIR(info.st_mode) and not prefix:
                inner = os.open(
                    entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root
                )
                try:
                    yield from _walk(inner, name + "/")
                finally:
                    os.close(inner)
            elif stat.S_ISREG(info.st_mode):
                yield name, info.st_size
            else:
                kind = "a link" if stat.S_ISLNK(info.st_mode) else "neither a file nor a folder of a bundle"
                raise UntrustedError(f"the bundle has {name[:120]!r}, which is {kind}")


def _compare_listing(manifest: Manifest, found: dict[str, int], path: Path) -> None:
    found.pop(MANIFEST, None)
    if extra := sorted(set(found) - set(manifest.files)):
        raise UntrustedError(
            f"the bundle {path} has the file {extra[0][:120]!r}, which its manifest doesn't list",
            hint="if you put it there, put it elsewhere",
        )
    if missing := sorted(set(manifest.files) - set(found)):
        size = manifest.files[missing[0]].size
        raise UntrustedError(
            f"the bundle {path} lacks {missing[0]}, which its manifest lists with {size} bytes", hint=_REPAIR
        )
    for name, entry in manifest.files.items():
        if found[name] != entry.size:
            raise UntrustedError(
                f"{path / name} has {found[name]} bytes, the manifest says {entry.size}", hint=_REPAIR
            )


def _open_file(root: int, name: str) -> int:
    """Opens a file inside the folder, following no link on the way."""
    folder, _, leaf = name.rpartition("/")
    if not folder:
        return os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=root)
    inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
    try:
        return os.open(leaf, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=inner)
    finally:
        os.close(inner)


def _read(root: int, name: str, limit: int) -> bytes:
    with os.fdopen(_open_file(root, name), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UntrustedError(f"{name} is not a plain file")
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UntrustedError(f"{name} is larger than {limit} bytes")
    return data


def _verify(root: int, path: Path, name: str, entry: FileEntry, *, keep: bool) -> bytes | None:
    """Hashes one file; returns its bytes when `keep`."""
    if keep:
        data = _read(root, name, entry.size)
        digest, size = hashlib.sha256(data).hexdigest(), len(data)
    else:
        data, size, state = None, 0, hashlib.sha256()
        with os.fdopen(_open_file(root, name), "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                state.update(chunk)
                size += len(chunk)
        digest = state.hexdigest()
    if size != entry.size or digest != entry.sha256:
        raise UntrustedError(
            f"{path / name} is not the file that the manifest describes: its sha256 differs, {digest[:12]}... instead of "
            f"{entry.sha256[:12]}...",
            hint=_REPAIR,
        )
    return data


def _check_against_plan(plan: Plan, manifest: Manifest) -> None:
    for name, kernel in plan.kernels.items():
        if kernel.file not in manifest.files:
            raise UntrustedError(f"kernel {name} is in {kernel.file}, which the bundle lacks")
    for name, function in plan.functions.items():
        for label, tree in (("in_tree", function.in_tree), ("out_tree", function.out_tree)):
            if tree is not None:
                check_tree(tree, f"plan.functions.{name}.{label}")
