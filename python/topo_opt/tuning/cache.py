"""Tuning entries on disk: the user's cache, files of the package, bundles.

A cache is a folder with one file an entry, `<device>/<structure>/<text>-<versions>.json`, written by a rename so that
processes can share it. What cannot be read is not there, with a remark.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

from topo_opt.errors import InputError
from topo_opt.tuning.key import Key
from topo_opt.tuning.records import SCHEMA, Entry, file_content, read_content

ENVIRONMENT = "TOPO_OPT_TUNING_CACHE"
FILE = "tuning.json"
"""Its name in a bundle."""
FARTHEST = 6.0
"""Sizes that lie farther apart, in powers of two over all dims, tell nothing."""
_MAX_BYTES = 64 << 20
_TOOLS = ("topo-opt", "torch", "triton")


def default_folder() -> Path:
    """The user's cache: `$TOPO_OPT_TUNING_CACHE`, else below `$XDG_CACHE_HOME` or `~/.cache`."""
    if os.environ.get(ENVIRONMENT):
        return Path(os.environ[ENVIRONMENT])
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "topo-opt" / "tuning"


@cache
def versions() -> dict[str, str]:
    """What a measured time depends on besides kernel and device: the tools, and the text of the code generators."""
    found = {}
    for name in _TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    state = hashlib.sha256()
    generators = files("topo_opt.codegen").joinpath("triton")
    for file in sorted(generators.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".py"):
            state.update(file.read_bytes())
    return found | {"generators": state.hexdigest()[:16]}


@dataclass
class Store:
    """Entries of one device: the cache folder (read and written) and further files (read only).

    `remarks` are sentences about what could not be used.
    """

    device: str
    folder: Path | None
    data: Sequence[Entry] = ()
    remarks: list[str] = field(default_factory=list)
    versions: Mapping[str, str] = field(default_factory=versions)

    def exact(self, key: Key) -> Entry | None:
        """What was measured here, with the same tools, for this very kernel."""
        path = self._path(key)
        entry = self._read(path) if path else None
        return (
            entry if entry and self._is(entry, key) and dict(entry.versions) == dict(self.versions) else None
        )

    def same_kernel(self, key: Key) -> Entry | None:
        """What was measured for this very kernel with other versions of the tools: shipped data first."""
        return next((e for e in (*self.data, *self._neighbours(key)) if self._is(e, key)), None)

    def nearest(self, key: Key) -> Entry | None:
        """The entry of the same structure whose sizes are the nearest; ties go to the smaller sizes."""
        near = [
            (key.distance(e.key), e.key.sizes, e.key.text, i, e)
            for i, e in enumerate((*self.data, *self._neighbours(key)))
            if e.device == self.device and e.key.text != key.text
        ]
        near = [n for n in near if n[0] <= FARTHEST]
        return min(near, key=lambda n: n[:4])[-1] if near else None

    def put(self, entry: Entry) -> None:
        """Adds an entry; that it cannot be written is a remark, since the compile does not depend on it."""
        path = self._path(entry.key)
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"schema": SCHEMA, "entries": [entry.as_json()]}, indent=1)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
                file.write(content)
            os.replace(file.name, path)
        except OSError as error:
            self._remark(f"{path.parent} can't be written: {error.strerror or error}")

    def _is(self, entry: Entry, key: Key) -> bool:
        return entry.device == self.device and entry.key == key

    def _path(self, key: Key) -> Path | None:
        if self.folder is None:
            return None
        tools = hashlib.sha256(json.dumps(dict(self.versions), sort_keys=True).encode()).hexdigest()[:12]
        return self.folder / self.device / key.structure / f"{key.text}-{tools}.json"

    def _neighbours(self, key: Key) -> list[Entry]:
        """All entries of one structure in the cache folder, in the order of their names."""
        path = self._path(key)
        if path is None or not path.parent.is_dir():
            return []
        found = (self._read(p) for p in sorted(path.parent.glob("*.json")))
        return [e for e in found if e is not None]

    def _read(self, path: Path) -> Entry | None:
        try:
            with path.open("rb") as file:
                return read_content(json.loads(file.read(_MAX_BYTES)))[0]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, IndexError) as error:
            self._remark(f"{path} is ignored: {_reason(error)}")
            return None

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)


def open_store(
    device: str, folder: Path | None, extra: Iterable[Path] = (), *, shipped: bool = True
) -> Store:
    """The store of one device.

    Args:
        folder: the cache, or None to neither read nor write one.
        extra: files of entries, or bundles with such a file inside; they go before the data of the package.

    Raises:
        InputError: a file in `extra` that cannot be read: it was named by the user.
    """
    entries = [e for path in extra for e in read_file(path)]
    if shipped:
        entries += shipped_entries(device)
    return Store(device, folder, [e for e in entries if e.device == device])


def shipped_entries(device: str) -> list[Entry]:
    """What the package knows about a device."""
    file = files("topo_opt.hw_topologies").joinpath("tuning", f"{device}.json")
    return read_content(json.loads(file.read_bytes())) if file.is_file() else []


def read_file(path: Path) -> list[Entry]:
    """The entries of a file, or of a bundle.

    Raises:
        InputError: it has none.
    """
    place = path / FILE if path.is_dir() else path
    try:
        with place.open("rb") as file:
            return read_content(json.loads(file.read(_MAX_BYTES)))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"{place} has no tuning data: {_reason(error)}",
            hint=f"expected a file written by topo-opt, or a bundle with {FILE}",
        ) from None


def write_file(path: Path, entries: Sequence[Entry], *, brief: bool = False) -> None:
    """Writes entries as one file."""
    path.write_text(json.dumps(file_content(entries, brief=brief), indent=1) + "\n")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)[:200]
