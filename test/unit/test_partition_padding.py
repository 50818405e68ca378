"""Dimensions that do not divide: padded parts, equal to the whole in one process and in several."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from lowering import lowered
from sharded import RECOGNISE, check_equal, partitioned
from test_ranks import start
from torch import nn
from torch_mlir import ir

from topo_opt import driver, reference
from topo_opt.errors import TopoError
from topo_opt.frontend.ingest import parse
from topo_opt.pipeline import remarks
from topo_opt.pipeline.run import run
from topo_opt.reference.binding import find_function
from topo_opt.sharding.annotate import lift
from topo_opt.sharding.collective import steps
from topo_opt.sharding.named import parse_mesh
from topo_opt.sharding.spec import Sharding


class Language(nn.Module):
    """Tied embeddings, a norm, two products with biases around an activation that makes ones of zeros, and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(101, 15), nn.LayerNorm(15)
        self.up, self.down = nn.Linear(15, 21), nn.Linear(21, 15)
        self.register_buffer("seen", torch.zeros(101))

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down(torch.exp(self.up(self.norm(x))))
        scores = self.norm(x) @ self.embed.weight.T
        self.seen.add_(torch.exp(scores[0, 0]))
        return torch.softmax(scores, -1), scores.amax(1), self.seen.sum(), ids.sum() // (1 + ids.amax(0))


@pytest.fixture(scope="module")
def language() -> tuple[ir.Module, list[torch.Tensor], list[torch.Tensor]]:
    """A module, arguments, and the results of the whole."""
    torch.manual_seed(0)
    module = Language().eval().requires_grad_(False)
    ids = torch.randint(0, 101, (3, 7))
    program = lowered(torch.export.export(module, (ids,), strict=False))
    run(RECOGNISE, program)
    arguments = reference.bind_inputs(program, "main", dict(module.state_dict()), [ids])
    return program, arguments, reference.run(program, "main", arguments)


PATTERNS = {
    "vocabulary": "embed.weight=x,_",
    "columns then rows": "up.weight=x,_",
    "inner dimension": "up.weight=_,x",
    "what a norm adds up": "norm.weight=x",
    "batch": "ids=x,_",
    "sequence": "ids=_,x",
    "state": "seen=x",
    "batch and columns": "ids=x,_;up.weight=y,_",
    "two axes": "up.weight=x+y,_;embed.weight=y+x,_",
    "results": "output.0=_,_,x;output.1=_,y",
    "everything": "ids=x,_;embed.weight=y,_;up.weight=y,_;seen=x;output.1=_,x",
}


@pytest.mark.parametrize("simplified", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_padded_equals_whole(language, name: str, simplified: bool) -> None:
    program, arguments, whole = language
    more = ("cse", "topo-simplify-collectives", "topo-lower-slices") if simplified else ()
    ranks = partitioned(program, "x=2,y=4", PATTERNS[name], more)
    assert "topo.whole" in str(ranks)
    check_equal(ranks, arguments, whole)


def test_rows_of_one_device_are_all_padding(language) -> None:
    """21 columns over 8 devices are 3 for each of the first seven; 15 are 2, and the last one has one."""
    program, arguments, whole = language
    ranks = partitioned(program, "x=8", "up.weight=x,_;norm.weight=x")
    assert "tensor<3x15xf32>" in str(ranks)
    check_equal(ranks, arguments, whole)


def test_what_is_uneven_is_split_over_all_axes_at_once() -> None:
    """Six over a: three each; over a and b: two each, of which no two make three."""
    over_a, over_ab, whole = (Sharding((axes,)) for axes in (("a",), ("a", "b"), ()))
    uneven = frozenset({0})
    assert [(s.kind, s.axes) for s in steps(over_ab, over_a, uneven)] == [
        ("all_gather", ("a", "b")),
        ("all_slice", ("a",)),
    ]
    assert [s.kind for s in steps(over_ab, over_a)] == ["all_gather"]
    terms = Sharding(((),), ("a",))
    assert [s.kind for s in steps(terms, over_ab, uneven)] == ["all_reduce", "all_slice"]
    assert [s.kind for s in steps(terms, over_a, uneven)] == ["reduce_scatter"]
    assert [s.kind for s in steps(over_ab, whole, uneven)] == ["all_gather"]


DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i1": torch.bool,
}
REDUCTION = """
shard.grid @mesh(shape = 4) {{topo.axes = ["x"]}}
func.func @main(%x: tensor<3x10x{kind}>) -> tensor<3x{kind}> {{
  %s = shard.sharding @mesh split_axes = [[], [0]] : !shard.sharding
  %a = shard.shard %x to %s : tensor<3x10x{kind}>
  %z = arith.constant {start}
  %e = tensor.empty() : tensor<3x{kind}>
  %i = linalg.fill ins(%z : {kind}) outs(%e : tensor<3x{kind}>) -> tensor<3x{kind}>
  %y = linalg.generic {{indexing_maps = [affine_map<(m, k) -> (m, k)>, affine_map<(m, k) -> (m)>], iterator_types = ["parallel", "reduction"]}}
       ins(%a : tensor<3x10x{kind}>) outs(%i : tensor<3x{kind}>) {{
  ^bb0(%v: {kind}, %acc: {kind}):
    %r = {op} %v, %acc : {kind}
    linalg.yield %r : {kind}
  }} -> tensor<3x{kind}>
  return %y : tensor<3x{kind}>
}}"""


@pytest.mark.parametrize(
    ("op", "kind", "start"),
    [
        ("arith.addf", "f32", "0.0 : f32"),
        ("arith.mulf", "f32", "1.0 : f32"),
        ("arith.maximumf", "f32", "0xFF800000 : f32"),
        ("arith.minimumf", "bf16", "0x7F80 : bf16"),
        ("arith.muli", "i64", "1 : i64"),
        ("arith.maxsi", "i64", "-9223372036854775808 : i64"),
        ("arith.minsi", "i32", "2147483647 : i32"),
        ("arith.andi", "i1", "true"),
        ("arith.ori", "i1", "false"),
    ],
)
def test_reductions_skip_padding(op: str, kind: str, start: str) -> None:
    """Ten over four devices: three, three, three and one. All values have one sign, so that zeros in padding would show."""
    text = REDUCTION.format(op=op, kind=kind, start=start)
    ranks, plain = parse(text), parse(text)
    x = torch.arange(1, 31).reshape(3, 10).remainder(3).add(1)
    x = (-x if "max" in op else x).to(DTYPES[kind])
    if kind == "i1":
        x = torch.full((3, 10), op == "arith.andi")
    with plain.context, ir.Location.unknown():
        lift(find_function(plain, "main"), parse_mesh("x=4"))
    run("builtin.module(topo-propagate-shardings,topo-partition)", ranks)
    assert "shard.all_reduce" in str(ranks)
    check_equal(ranks, [x], reference.run(plain, "main", [x]))


class Images(nn.Module):
    """Convolutions, which are calls of ATen, of three images; a sort of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 6, 3, stride=2), nn.ConvTranspose2d(6, 5, 3, stride=2)
        self.norm, self.head = nn.GroupNorm(2, 6), nn.Linear(5, 7)

    def forward(self, images):
        x = torch.relu(self.norm(self.down(images)))
        return torch.sort(self.head(self.up(x).mean((2, 3))), dim=1).values


@pytest.mark.parametrize(
    ("mesh", "shard", "gathers"),
    [
        ("x=2", "images=x,_,_,_", 1),
        ("x=3", "images=x,_,_,_", 1),
        ("x=2,y=4", "images=x,_,_,_;down.weight=y,_,_,_", None),
        ("x=4", "up.weight=_,x,_,_", None),
    ],
)
def test_convolutions_of_some_images_and_channels(mesh: str, shard: str, gathers: int | None) -> None:
    """Three images over two devices are two and one: everything up to the result is computed of a device's own."""
    torch.manual_seed(0)
    module, images = Images().eval().requires_grad_(False), torch.randn(3, 3, 9, 9)
    program = lowered(torch.export.export(module, (images,), strict=False))
    arguments = reference.bind_inputs(program, "main", dict(module.state_dict()), [images])
    ranks = partitioned(program, mesh, shard, ("cse", "topo-simplify-collectives", "topo-lower-slices"))
    text = str(ranks)
    assert re.search(r"call @aten\.\d+\.part0", text)
    if gathers is not None:
        assert not re.search(r"@aten\.\d+\(", text), "nothing is called for all images"
        assert text.count("= shard.all_gather") == gathers and "shard.all_reduce" not in text
    check_equal(ranks, arguments, reference.run(program, "main", arguments))


class Heads(nn.Module):
    """Three heads of four; a weight that is only turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.turned = nn.Linear(5, 12), nn.Parameter(torch.randn(5))

    def forward(self, x):
        heads = self.q(x).view(6, 3, 4).transpose(0, 1)
        return torch.softmax(heads, -1), x + self.turned.flip(0)


def test_splits_that_do_not_reach_are_told() -> None:
    """Twelve columns divide by two, three heads do not."""
    torch.manual_seed(0)
    module, x = Heads().eval().requires_grad_(False), torch.randn(6, 5)
    program = lowered(torch.export.export(module, (x,), strict=False))
    arguments = reference.bind_inputs(program, "main", dict(module.state_dict()), [x])
    with remarks.collect() as told:
        ranks = partitioned(program, "x=2", "q.weight=x,_;turned=x")
    check_equal(ranks, arguments, reference.run(program, "main", arguments))
    first, second = told
    assert (first.kind, second.kind) == ("not-split", "not-split")
    assert "3 x 4 over x (2 devices) are no whole pieces" in first.reason
    assert "the nearest number of devices is 1" in first.reason
    assert second.subject == "turned" and "every device gathers it" in second.reason
    with remarks.collect() as told:
        partitioned(program, "x=3", "q.weight=x,_")
    assert not told


def test_fewer_elements_than_devices_are_refused(tmp_path: Path) -> None:
    program = torch.export.export(Language().eval(), (torch.zeros(3, 7, dtype=torch.int64),), strict=False)
    options = driver.Options("cpu", mesh="x=4,y=2", shard=("ids=x,_",), tune="off")
    with pytest.raises(TopoError) as error:
        driver.compile({"main": program}, options, tmp_path / "bundle")
    message = f"{error.value} {error.value.hint}"
    assert (
        "'ids' cannot be split as x,_: dimension 0 of [3, 7] has fewer elements than x has devices (4)"
        in message
    )
    assert "over y (2 devices) it can be split" in message


class Routed(nn.Module):
    """Each row times the matrix of the expert that it picks."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices, self.router = nn.Parameter(torch.randn(5, 8, 16)), nn.Linear(16, 5)

    def forward(self, x):
        expert = self.router(x).argmax(-1)
        return torch.bmm(self.matrices[expert], x.unsqueeze(-1)).squeeze(-1)


class Experts(nn.Module):
    """Two gated experts a row of six, and the sum of what they make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.randn(6, 24, 16)), nn.Parameter(torch.randn(6, 16, 12))
        self.router = nn.Linear(16, 6)

    def forward(self, x):
        scores, expert = self.router(x).softmax(-1).topk(2)
        expert, rows = expert.flatten(), x.repeat_interleave(2, 0)
        gate, up = torch.bmm(self.gate_up[expert], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        made = torch.bmm(self.down[expert], (nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (made * scores.flatten()[:, None]).view(-1, 2, 16).sum(1)


BUNDLES = {
    "gated": (Experts, lambda: torch.randn(9, 16), {"planner": {"pin": "gate_up=x,_,_;down=x,_,_"}}),
    "language": (Language, lambda: torch.randint(0, 101, (3, 7)), {"shard": ("embed.weight=x,_", "up.weight=x,_", "ids=x,_", "seen=x")}),
    "seven-rows": (Routed, lambda: torch.randn(7, 16), {"shard": ("matrices=x,_,_",)}),
    "one-row": (Routed, lambda: torch.randn(1, 16), {"shard": ("matrices=x,_,_",)}),
}  # fmt: skip


@pytest.fixture(scope="module")
def in_two_processes(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A folder with these bundles for two ranks, and what two processes say that check them against float64 and eager."""
    folder = tmp_path_factory.mktemp("padding")
    for name, (module, argument, split) in BUNDLES.items():
        torch.manual_seed(0)
        whole, given = module().eval().requires_grad_(False), argument()
        options = driver.Options("cpu", mesh="x=2", tune="off", **split)
        program = torch.export.export(whole, (given,), strict=False)
        driver.compile({"main": program}, options, folder / name / "bundle")
    checks = start(folder, 2, ",".join(f"check:{name}" for name in BUNDLES))
    return folder, {name: checks[0][f"check:{name}"] for name in BUNDLES}


def test_two_ranks_with_padding_compute_as_one_does(in_two_processes) -> None:
    """A bundle in two processes, weights, a state and inputs with padding, against the program as PyTorch runs it."""
    folder, said = in_two_processes
    plan = json.loads((folder / "language" / "bundle" / "plan.json").read_text())
    buffers = plan["functions"]["main"]["variants"][0]["buffers"]
    held = {b["name"]: (b["shape"], b["whole"]) for b in buffers if b.get("whole")}
    assert held["embed.weight"] == ([51, 15], [101, 15]) and held["ids"] == ([2, 7], [3, 7])
    assert "check passed" in said["language"]


def test_what_is_between_the_products_of_experts_is_a_part_of_their_kernels(in_two_processes) -> None:
    """Also where the rows of other devices' experts have to be zero in the end."""
    folder, said = in_two_processes
    plan = json.loads((folder / "gated" / "bundle" / "plan.json").read_text())
    (variant,) = plan["functions"]["main"]["variants"]
    families = [plan["kernels"][s["kernel"]]["family"] for s in variant["steps"] if s["step"] == "kernel"]
    assert families.count("experts") == 2
    first = families.index("experts")
    assert families[first + 1] == "experts" and set(families[first + 2 :]) == {"loops"}
    assert "check passed" in said["gated"]


@pytest.mark.parametrize("name", ["seven-rows", "one-row"])
def test_two_ranks_compute_the_rows_of_their_experts(in_two_processes, name: str) -> None:
    """Five experts over two devices. Of many rows a kernel leaves those of others as they were, of a few it computes something."""
    folder, said = in_two_processes
    kernels = [path.name for path in (folder / name / "bundle" / "kernels").iterdir()]
    assert any(kernel.startswith("k_experts") for kernel in kernels)
    assert any(kernel.startswith("k_group_rows") for kernel in kernels) == (name == "seven-rows")
    assert "check passed" in said[name]
