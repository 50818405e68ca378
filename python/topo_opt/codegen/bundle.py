"""Writes a bundle folder, whole or not at all.

Everything goes to a temporary folder beside the target, which takes the target's name at the very end. A full disk, a
signal or an error leaves no trace, and an older bundle of the same name stays as it was until then.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from topo_opt.codegen.plan import BuiltPlan
from topo_opt.errors import InputError
from topo_opt.output_folder import refuse_strangers
from topo_opt.runtime import strict_json
from topo_opt.runtime.bundle import FORMAT, MANIFEST, PLACES, SCHEMA
from topo_opt.runtime.strict_json import Json

TOOLS = ("topo-opt", "torch", "torch-mlir", "triton", "numpy")
_CHUNK = 8 << 20


def write_bundle(
    out: str | Path,
    built: BuiltPlan,
    kernels: Mapping[str, str],
    *,
    aten: Json = None,
    ir: Mapping[str, str] | None = None,
    report: Json = None,
    page: str | None = None,
    tuning: Json = None,
    weights: Json = None,
    weights_writer: Callable[[Path], None] | None = None,
) -> Path:
    """Writes the bundle and returns its path.

    Args:
        out: folder to make; an existing bundle there is replaced, anything else is refused.
        kernels: kernel symbol -> Python source, at least those of the plan.
        aten: function name -> AtenProgram JSON.
        ir: name without extension -> MLIR text, kept for reading.
        page: report.html, or None.
        tuning: content of tuning.json (measured tiles, which another compile can read), or None.
        weights: content of weights.json (a reference to the source archive), or None.
        weights_writer: writes weights.safetensors at the path it is given, or None.

    Raises:
        InputError: the folder can't be written, or something that is not a bundle is in the way.
    """
    out = Path(os.path.abspath(out))
    refuse_strangers(out)
    work: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        os.chmod(work, 0o777 & ~_umask())
        files = {"aten": aten, "report": report, "tuning": tuning, "weights": weights}
        _fill(work, built, kernels, files, ir or {}, weights_writer)
        if page is not None:
            _write(work / "report.html", page.encode())
        _write(work / MANIFEST, strict_json.dumps(_manifest(work)))
        _put_in_place(work, out)
    except OSError as error:
        raise InputError(f"the bundle {out} can't be written: {_reason(error)}") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return out


def _fill(
    work: Path,
    built: BuiltPlan,
    kernels: Mapping[str, str],
    files: Mapping[str, Json],
    ir: Mapping[str, str],
    weights_writer: Callable[[Path], None] | None,
) -> None:
    _write(work / "plan.json", strict_json.dumps(built.plan.to_json()))
    for name, value in files.items():
        if value is not None:
            _write(work / f"{name}.json", strict_json.dumps(value))
    for symbol, kernel in built.plan.kernels.items():
        _write(work / kernel.file, kernels[symbol].encode())
    for name, text in ir.items():
        _write(work / "ir" / f"{name}.mlir", text.encode())
    if built.constants:
        write_constants(work / "constants.safetensors", built.constants)
    if weights_writer is not None:
        weights_writer(work / "weights.safetensors")


def write_constants(path: Path, constants: Mapping[str, np.ndarray]) -> None:
    """constants.safetensors: arrays as raw little-endian bytes; the plan's buffers say what they mean."""
    import safetensors.numpy

    raw = {k: np.frombuffer(v.tobytes(), dtype=np.uint8) for k, v in constants.items()}
    _write(path, safetensors.numpy.save(raw))


def _manifest(work: Path) -> Json:
    files = {}
    for path in sorted(p for p in work.rglob("*") if p.is_file()):
        name = path.relative_to(work).as_posix()
        if not PLACES.fullmatch(name):
            raise InputError(f"{name!r} has no place in a bundle")
        files[name] = {"sha256": _sha256(path), "size": path.stat().st_size}
    return {"format": FORMAT, "schema": SCHEMA, "tools": _tool_versions(), "files": files}


def _tool_versions() -> dict[str, str]:
    out = {}
    for name in TOOLS:
        try:
            out[name] = version(name)
        except PackageNotFoundError:
            continue
    return out


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "wb") as file:
        file.write(data)
        file.flush()


def _put_in_place(work: Path, out: Path) -> None:
    """Renames; an older bundle is moved aside first and comes back when the rename fails."""
    _sync(work)
    if not out.exists():
        os.rename(work, out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    try:
        os.rename(out, aside / "bundle")
        try:
            os.rename(work, out)
        except BaseException:
            os.rename(aside / "bundle", out)
            raise
    finally:
        if out.exists():
            shutil.rmtree(aside, ignore_errors=True)


def _sync(work: Path) -> None:
    """Makes sure that the data is on disk before the name is: a delayed "disk full" must show here."""
    for path in [*(p for p in work.rglob("*") if p.is_file()), work]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full; nothing was left behind"
    return f"{error.strerror or error}"
