"""Small `.pt2` files, and a way to write changed ones."""

import collections
import json
import zipfile
from pathlib import Path

import torch
from torch import nn

Dim = torch.export.Dim
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.bool,
    torch.complex64,
]


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


class Mixed(nn.Module):
    """Tied and strided weights, every dtype, empty and 0-d tensors, state, a non-persistent buffer and a constant."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("cache", torch.zeros(2, 4))
        values = [torch.tensor([0.0, 1.0, 0.0, 2.0]).to(dtype) for dtype in DTYPES]
        self.each = nn.ParameterList([nn.Parameter(value, requires_grad=False) for value in values])
        self.view = nn.Parameter(torch.randn(8, 8)[::2, 1:])
        self.transposed = nn.Parameter(torch.randn(3, 5).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(3.0))
        self.constant = torch.tensor([1.0, 2.0])

    def forward(self, x, n):
        self.cache[0].copy_(x[0] * n)
        rest = self.view.sum() + self.scalar + self.empty.sum() + self.transposed.sum()
        each = [value.to(torch.complex64).abs() for value in self.each]
        return {
            "y": self.b(self.a(x)).bfloat16() + self.table,
            "k": self.constant,
            "n": n,
            "each": each,
            "rest": rest,
        }


class Keywords(nn.Module):
    """Keyword arguments and nested containers."""

    def forward(self, x, *, scale, extra=None):
        return {"r": x + scale, "l": [x, (x, None)], "o": collections.OrderedDict(a=x * extra["k"])}


def _nonzero(x):
    n = x.sum().int().item()
    torch._check(n >= 2)
    torch._check(n < 100)
    return torch.zeros(n, 3), x.nonzero(), n * 2


def _autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


X = torch.ones(4, 6)
BATCH = Dim("batch", min=2, max=20)
# name -> module, arguments, keyword arguments, dynamic shapes
SAMPLES = {
    "mixed": (Mixed, (torch.ones(3, 4), 2.0), {}, ({0: BATCH}, None)),
    "keywords": (Keywords, (X,), {"scale": X, "extra": {"k": X, "unused key": True}}, None),
    "sizes": (
        lambda: Fn(
            lambda x: (
                x * (x.shape[0] // 2),
                torch.arange(x.shape[0] * 2 + 1),
                x.sum() * torch.sym_sqrt(x.shape[0]),
            )
        ),
        (X,),
        {},
        (({0: BATCH, 1: Dim("seq", max=100)},),),
    ),
    "derived": (
        lambda: Fn(lambda x, y: torch.cat([x, y])),
        (X, torch.ones(8, 6)),
        {},
        (({0: BATCH}, {0: 2 * BATCH}),),
    ),
    "guarded": (
        lambda: Fn(lambda x: nn.functional.avg_pool1d(x, 2)),
        (torch.ones(2, 3, 8),),
        {},
        (({2: Dim.AUTO},),),
    ),
    "data_dependent": (lambda: Fn(_nonzero), (torch.ones(4),), {}, None),
    "cond": (
        lambda: Fn(lambda x: torch.cond(x.sum() > 0, lambda a: (a + 1,), lambda a: (a - 1,), (x,))),
        (X,),
        {},
        None,
    ),
    "autocast": (lambda: Fn(_autocast), (X,), {}, None),
    "specials": (
        lambda: Fn(lambda x: (x.masked_fill(x > 0, float("-inf")), torch.complex(x, x) * 2j)),
        (X,),
        {},
        None,
    ),
    "symbolic_input": (lambda: Fn(lambda x, n: (x * n, n // 2)), (X, 4), {}, ((None, Dim.DYNAMIC),)),
    "input_mutation": (lambda: Fn(lambda x: x.add_(1)), (X.clone(),), {}, None),
}


def export(name: str) -> torch.export.ExportedProgram:
    """The sample as an exported program."""
    make, args, kwargs, shapes = SAMPLES[name]
    return torch.export.export(make(), args, kwargs, dynamic_shapes=shapes, strict=False)


def save(name: str, folder: Path) -> Path:
    """The sample as a file."""
    path = folder / f"{name}.pt2"
    torch.export.save(export(name), path)
    return path


def entries(path: Path) -> dict[str, bytes]:
    """Entry name without the root folder -> content."""
    with zipfile.ZipFile(path) as archive:
        return {info.filename.split("/", 1)[1]: archive.read(info) for info in archive.infolist()}


def write(path: Path, contents, *, root: str = "m", compress: int = zipfile.ZIP_STORED) -> Path:
    """A zip of `contents` (a dictionary, or pairs, so that a name may occur twice) under the folder `root`."""
    pairs = contents.items() if isinstance(contents, dict) else contents
    with zipfile.ZipFile(path, "w", compress) as archive:
        for name, data in pairs:
            full = name if name.startswith("!") else f"{root}/{name}"
            archive.writestr(zipfile.ZipInfo(full.removeprefix("!")), data, compress_type=compress)
    return path


def edit_json(source: Path, target: Path, entry: str, change) -> Path:
    """A copy of the file in which `change(document)` was applied to one JSON entry."""
    contents = entries(source)
    document = json.loads(contents[entry])
    change(document)
    contents[entry] = json.dumps(document).encode()
    return write(target, contents)


def rename_local_header(path: Path, old: str, new: str) -> None:
    """Changes a name in the entry's own header only, so that it disagrees with the directory."""
    data = path.read_bytes()
    at = data.index(old.encode())
    path.write_bytes(data[:at] + new.encode() + data[at + len(new) :])
