"""What a file is, from its first and last bytes, and how deep its JSON is: what must be known before anything is parsed."""

import re
from pathlib import Path
from typing import BinaryIO

from topo_opt.errors import InputError

RESAVE = 'save it again with torch.export.save(torch.export.export(model, args), "model.pt2")'
_END_BYTES = 22


def check_kind(path: Path, file: BinaryIO) -> None:
    """Raises InputError unless the file is a zip archive from its first to its last byte; says what it seems to be."""
    head = file.read(64)
    file.seek(0)
    if head[:4] == b"PK\x03\x04":
        _check_end(path, file)
        return
    guesses = [
        (not head, "is empty"),
        (head[:2] == b"\x80\x02" or head[:1] == b"\x80", "is a pickle (an old torch.save file), not a .pt2"),
        (
            (head[8:9] == b"{" and head[1:8].strip(b"\0") in (b"",)) or head[8:10] == b'{"',
            "is a safetensors file",
        ),
        (head[:4] == b"\x7fELF", "is a compiled library"),
        (head[:4] == b"GGUF", "is a GGUF file"),
        (path.suffix == ".py", "is a Python source file"),
        (path.suffix == ".onnx", "is an ONNX file"),
        (path.suffix in (".mlir", ".mlirbc"), "is MLIR, but was read as a .pt2"),
    ]
    what = next((text for found, text in guesses if found), "is not a .pt2 (it is no zip archive)")
    raise InputError(f"{path} {what}", hint=f"a .pt2 is needed: {RESAVE}")


def _check_end(path: Path, file: BinaryIO) -> None:
    """The archive ends where the file ends; a search for its directory might find one that an entry contains."""
    file.seek(0, 2)
    file.seek(max(0, file.tell() - _END_BYTES))
    end = file.read()
    file.seek(0)
    if len(end) != _END_BYTES or end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise InputError(
            f"{path} is a damaged .pt2: it is cut off, or has something after its end", hint=RESAVE
        )


# The end of the text also ends a string, so that unbalanced quotes don't make the search quadratic.
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_BRACKETS = re.compile(rb"[\[{]+|[\]}]+")


def nesting(raw: bytes) -> int:
    """The nesting depth of JSON text, found without parsing it (a parser would recurse)."""
    depth = deepest = 0
    for run in _BRACKETS.findall(_STRINGS.sub(b"", raw)):
        depth += len(run) if run[:1] in b"[{" else -len(run)
        deepest = max(deepest, depth)
    return deepest
