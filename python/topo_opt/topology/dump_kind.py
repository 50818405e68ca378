"""Which kind of dump of a machine some bytes are, told by their first element or by a row of a matrix, without reading them whole."""

import re
import shlex
from pathlib import Path
from typing import Literal

DumpKind = Literal["NCCL topology XML", "hwloc XML", "nvidia-smi topo -m"]
_ROOTS: dict[bytes, DumpKind] = {b"system": "NCCL topology XML", b"topology": "hwloc XML"}
# Declarations, comments and processing instructions may stand in front of the root.
_ROOT = re.compile(rb"<([A-Za-z][\w.-]*)")
_PROLOGUE = re.compile(rb"(?s)\s*(<\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>\[]*(\[.*?\]\s*)?>)")
_GPU = re.compile(r"GPU\d{1,4}$")
_CLASSES = re.compile(r"(X|SYS|SOC|NODE|PHB|PXB|PIX|NV\d{1,9})+")
_MAX_LINES = 20_000


def dump_kind(data: bytes) -> DumpKind | None:
    """The kind of dump, or None for anything else."""
    text = data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"{"):
        return None
    if text.startswith(b"<"):
        at = 0
        while (passed := _PROLOGUE.match(text, at)) is not None:
            at = passed.end()
        root = _ROOT.match(text[at:].lstrip())
        return _ROOTS.get(root[1]) if root else None
    lines = decoded(data).splitlines()[:_MAX_LINES]
    return "nvidia-smi topo -m" if any(map(_is_row, lines)) else None


def decoded(data: bytes) -> str:
    """The text of a dump, which Windows may have written as UTF-16."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def _is_row(line: str) -> bool:
    words = line.replace("|", " ").split()
    at = next((i for i, word in enumerate(words) if _GPU.search(word)), len(words))
    return any(map(_CLASSES.fullmatch, words[at + 1 :]))


def import_line(path: str) -> str:
    """What to do with a dump that was given where a topology is expected."""
    made = Path(path).stem + "-topology.json"
    return f"topo-hw import {shlex.quote(path)} -o {shlex.quote(made)} makes the topology {shlex.quote(made)} of it"
