"""The text of `nvidia-smi topo -m`, with what people paste around it.

Columns are found by their names and cells by what a cell can be, so that tabs, spaces, bars of tables, fused cells
("PIXNODE"), missing affinities, underlined headers and missing legends all read the same.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from topo_opt.errors import InputError
from topo_opt.topology.importers.models import Hints, with_model
from topo_opt.topology.importers.sketch import Sketch
from topo_opt.topology.importers.smi_tree import Matrix, build_tree

MAX_LINES = 20_000
MAX_DEVICES = 128
MAX_NVLINKS = 64
"""Links of one GPU to others; those known have 18 at most."""
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\[[0-9;]{1,6}m|\x1b[()][A-Z0-9]|[\x00-\x08\x0b-\x1f\x7f]")
_AFFINITY = re.compile(r"(CPU|NUMA)\s*Affinity|GPU\s*NUMA\s*ID", re.IGNORECASE)
_GPU = re.compile(r"GPU\d{1,4}$")
_CELL = re.compile(r"[\s]*(X|SYS|SOC|NODE|PHB|PXB|PIX|NV\d{1,9})(?![a-z])")
_STATUS = re.compile(r"[\s]*(X|OK|CNS|GNS|TNS|NS|DR|U)(?=\s|$)")
_STATUSES = {"OK", "CNS", "GNS", "TNS", "NS", "DR"}
_NAME = re.compile(r"\s*GPU\s*(\d{1,4}):\s*(.+?)\s*(?:\(UUID|$)")
_LEGEND = re.compile(r"\s*(NIC\d{1,4}):\s*(\S+)")
_CLASSES = {"SOC": "SYS"}  # before 2017


@dataclass
class _Text:
    """What is in the text besides the matrix."""

    names: dict[str, str] = field(default_factory=dict)
    nics: dict[str, str] = field(default_factory=dict)
    peers: dict[tuple[str, str], str] = field(default_factory=dict)
    partitioned: bool = False


def read_smi(text: str, what: str, device: str | None) -> Sketch:
    """The machine of a matrix.

    Raises:
        InputError: there is no matrix, it lacks rows or cells, or contradicts itself.
    """
    lines = [_ESCAPE.sub("", line).replace("|", " ").rstrip() for line in text.splitlines()[:MAX_LINES]]
    at, columns = _header(lines, what)
    matrix = _matrix(lines[at + 1 :], columns, bool(_AFFINITY.search(lines[at])), what)
    around = _around(lines)
    sketch = Sketch()
    for gpu in (column for column in columns if _GPU.match(column)):
        sketch.gpus[gpu.lower()] = with_model(Hints(name=around.names.get(gpu)), device)
    if around.partitioned:
        sketch.note("MIG is on: the topology describes whole GPUs, whose parts the matrix does not show")
    build_tree(sketch, matrix, around.nics, what)
    _peer_access(sketch, around.peers, matrix)
    return sketch


def _header(lines: list[str], what: str) -> tuple[int, list[str]]:
    for at, line in enumerate(lines):
        columns = _AFFINITY.split(line)[0].split()
        if not (columns and all(map(_is_label, columns)) and any(map(_GPU.match, columns))):
            continue
        following = next((later.split() for later in lines[at + 1 :] if _content(later)), [])
        if following[:1] != columns[:1] or _STATUSES.intersection(following):
            continue
        if len(columns) > MAX_DEVICES:
            raise InputError(f"{what} has {len(columns)} devices, at most {MAX_DEVICES} are allowed")
        if len(set(columns)) < len(columns):
            raise InputError(f"{what} names a column of the matrix twice")
        return at, columns
    raise InputError(
        f"{what} has no matrix of nvidia-smi: no line with GPU0, ... over rows of X, NV#, PIX, PXB, PHB, NODE, SYS",
        hint="expected NCCL's or hwloc's XML, or the output of nvidia-smi topo -m",
    )


def _content(line: str) -> bool:
    return bool(line.strip(" \t-:=+"))


def _is_label(word: str) -> bool:
    if word.startswith("GPU"):
        return _GPU.match(word) is not None
    return re.fullmatch(r"[A-Za-z][A-Za-z0-9_.:-]{0,40}", word) is not None and not _CELL.fullmatch(word)


def _matrix(lines: list[str], columns: list[str], has_affinity: bool, what: str) -> Matrix:
    classes: dict[tuple[str, str], str] = {}
    affinity: dict[str, tuple[str, str]] = {}
    for line in lines:
        if affinity and not _content(line):
            break
        label, rest = _split_label(line)
        if label not in columns or label in affinity:
            continue
        cells, rest = _cells(rest, label, columns, what)
        for column, cell in zip(columns, cells):
            classes[label, column] = _CLASSES.get(cell, cell)
        affinity[label] = _affinity(rest) if has_affinity else ("", "")
    missing = [column for column in columns if column not in affinity]
    if any(map(_GPU.match, missing)):
        raise InputError(f"{what} is partial: the matrix has no row for {', '.join(missing[:4])}")
    _check_symmetry(classes, columns, what)
    return Matrix(tuple(columns), classes, affinity)


def _split_label(line: str) -> tuple[str, str]:
    label = (line.split() or [""])[0]
    return label, line.partition(label)[2] if label else ""


def _cells(text: str, label: str, columns: list[str], what: str) -> tuple[list[str], str]:
    cells: list[str] = []
    at = 0
    while len(cells) < len(columns):
        match = _CELL.match(text, at)
        if match is None:
            word = (text[at:].split() or [""])[0][:20]
            found = (
                f"has '{word}' for {columns[len(cells)]}"
                if word
                else f"has {len(cells)} of {len(columns)} classes"
            )
            expected = "expected X, NV#, PIX, PXB, PHB, NODE or SYS"
            raise InputError(f"{what} is partial or damaged: the row of {label} {found}", hint=expected)
        cell = match.group(1)
        if cell.startswith("NV") and not 1 <= int(cell[2:]) <= MAX_NVLINKS:
            raise InputError(
                f"{what} is damaged: the row of {label} has {cell} for {columns[len(cells)]}",
                hint=f"expected 1 to {MAX_NVLINKS} NVLinks",
            )
        cells.append(cell)
        at = match.end()
    return cells, text[at:]


def _affinity(text: str) -> tuple[str, str]:
    """CPU and NUMA affinity. Cells may be empty; with spaces alone a list of CPUs is told by its dashes and commas."""
    if "\t" in text:
        cpus, numas, *_ = [part.strip() for part in text.lstrip(" ").removeprefix("\t").split("\t")] + [
            "",
            "",
        ]
        return cpus, numas
    words = text.split()
    if not words:
        return "", ""
    if len(words) == 1 and not re.search(r"[-,]", words[0]) and words[0].isdigit():
        return "", words[0]
    return words[0], words[1] if len(words) > 1 else ""


def _check_symmetry(classes: dict[tuple[str, str], str], columns: list[str], what: str) -> None:
    for i, a in enumerate(columns):
        if classes.get((a, a), "X") != "X":
            raise InputError(f"{what} is damaged: {a} is {classes[a, a]} to itself, expected X")
        for b in columns[i + 1 :]:
            there, back = classes.get((a, b)), classes.get((b, a))
            if "X" in (there, back):
                raise InputError(f"{what} is damaged: {a} and {b} are X, the class of a device to itself")
            if there is not None and back is not None and there != back:
                raise InputError(f"{what} contradicts itself: {a} to {b} is {there}, {b} to {a} is {back}")


def _around(lines: list[str]) -> _Text:
    out = _Text()
    for at, line in enumerate(lines):
        if match := _NAME.match(line):
            out.names.setdefault(f"GPU{match.group(1)}", match.group(2)[:80])
        elif match := _LEGEND.match(line):
            out.nics.setdefault(match.group(1), match.group(2)[:40])
        elif re.match(r"\s*MIG\s+\S+\s+Device", line):
            out.partitioned = True
        elif not out.peers and line.split() and all(map(_GPU.match, line.split())):
            cells = dict(_statuses(lines[at + 1 :], line.split()))
            out.peers = cells if len(cells) == len(line.split()) ** 2 else {}
    return out


def _statuses(lines: list[str], columns: list[str]) -> Iterator[tuple[tuple[str, str], str]]:
    """The cells of `nvidia-smi topo -p2p`, where such a matrix follows."""
    for line in lines[: len(columns)]:
        label, rest = _split_label(line)
        at = 0
        for column in columns:
            match = _STATUS.match(rest, at)
            if match is None or label not in columns:
                return
            yield (label, column), match.group(1)
            at = match.end()


def _peer_access(sketch: Sketch, peers: dict[tuple[str, str], str], matrix: Matrix) -> None:
    statuses = {pair: status for pair, status in peers.items() if status not in ("X", "U")}
    if not statuses or all(status == "OK" for status in statuses.values()):
        return
    if all(status != "OK" for status in statuses.values()):
        sketch.peer_farthest = ("LOC", "nvidia-smi topo -p2p in the dump: no pair of GPUs has peer access")
        return
    reach = matrix.farthest(pair for pair, status in statuses.items() if status == "OK")
    beyond = [pair for pair, status in statuses.items() if status != "OK" and matrix.within(pair, reach)]
    sketch.peer_farthest = (reach, "nvidia-smi topo -p2p in the dump: the farthest pair with peer access")
    if beyond:
        a, b = beyond[0]
        sketch.note(
            f"{a} and {b} have no peer access though they are no farther apart than {reach}: not expressed"
        )
