"""Models split over meshes in one process, against the same models whole."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import model_zoo
import torch
from float64_rule import tensors
from lowering import lowered
from torch_mlir import ir

from topo_opt import reference
from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.pipeline.run import run
from topo_opt.reference.binding import find_function
from topo_opt.sharding.signature import Slot, slots

EVERY_MODEL = "TOPO_ALL_MESHES"
"""Environment variable: all models of the zoo on all meshes, by columns and at random, planned for either. Takes a quarter of an hour."""
MODELS = ("llama_cache_decode", "qwen3_moe", "gpt2")
MESHES = ("x=2", "x=4", "x=8", "x=2,y=2", "x=2,y=4")
RECOGNISE = "builtin.module(topo-raise-rotary,topo-raise-masks,topo-count-recognised,topo-bubble-up-slices)"


@cache
def whole_model(name: str) -> tuple[ir.Module, list[Any], list[Any]]:
    """A model of the zoo in f32 as structured IR with its patterns recognised, arguments, and the results of the whole.

    Made once for all tests of a process, which leave it as it is.
    """
    case = model_zoo.ZOO[name](torch.float32)
    program = torch.export.export(case.module, case.args, case.kwargs, strict=False)
    module = lowered(program)
    run(RECOGNISE, module)
    named: dict[str, Any] = {**program.state_dict, **program.constants}
    state = {n: v.clone() for n, v in named.items() if isinstance(v, torch.Tensor)}
    given = reference.bind_inputs(module, "main", state, tensors((case.args, case.kwargs)))
    return module, given, reference.run(module, "main", given)


def models() -> list[str]:
    """The models that are tested: three, or all of the zoo."""
    return list(model_zoo.ZOO) if is_every_model() else list(MODELS)


def is_every_model() -> bool:
    """Whether everything is tested that can be."""
    return bool(os.environ.get(EVERY_MODEL))


def arguments(module: ir.Module) -> list[tuple[Slot, tuple[int, ...]]]:
    """What is said of every argument of `main`, and its shape."""
    func = find_function(module, "main")
    types = ir.FunctionType(ir.TypeAttr(func.attributes["function_type"]).value).inputs
    shapes = [tuple(ir.RankedTensorType(kind).shape) for kind in types]
    return list(zip(slots(func, "arguments"), shapes, strict=True))


def sizes(mesh: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}


def columns(module: ir.Module, mesh: str) -> str:
    """Every matrix split along its first dimension over the last axis, inputs along theirs over another one, where they divide."""
    first, *_, last = [*sizes(mesh).items(), *sizes(mesh).items()]
    found = []
    for slot, shape in arguments(module):
        if slot.kind == "param" and len(shape) == 2 and shape[0] % last[1] == 0:
            found.append(f"{slot.name}={last[0]},_")
        elif slot.kind == "input" and shape and first != last and shape[0] % first[1] == 0:
            found.append(f"{slot.name}={first[0]}" + ",_" * (len(shape) - 1))
    return ";".join(found)


def at_random(module: ir.Module, mesh: str, seed: int) -> str:
    """Half of the arguments split over axes and along dimensions that are drawn, whether they divide or not."""
    rng, found = random.Random(seed), []
    for slot, shape in arguments(module):
        if rng.random() < 0.5:
            continue
        split: list[list[str]] = [[] for _ in shape]
        parts, axes = [1] * len(shape), list(sizes(mesh).items())
        rng.shuffle(axes)
        for axis, size in axes:
            dims = [d for d in range(len(shape)) if shape[d] >= parts[d] * size]
            if dims and rng.random() < 0.8:
                dim = rng.choice(dims)
                split[dim].append(axis)
                parts[dim] *= size
        if any(split):
            found.append(f"{slot.name}=" + ",".join("+".join(axes) or "_" for axes in split))
    return ";".join(found)


def partitioned(module: ir.Module, mesh: str, shard: str, more: Sequence[str] = ()) -> ir.Module:
    """The program of one device, results whole; `module` stays as it is."""
    ranks = parse(bytecode(module))
    passes = [
        f'topo-propagate-shardings{{mesh={mesh} shard="{shard}" results=whole}}',
        "topo-partition",
        *more,
    ]
    run(f"builtin.module({','.join(passes)})", ranks)
    return ranks


def check_equal(ranks: ir.Module, given: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> None:
    """Sums in another order are allowed their rounding, integers and truth values nothing."""
    for position, (ours, wanted) in enumerate(
        zip(reference.run_ranks(ranks, "main", given), whole, strict=True)
    ):
        if not wanted.dtype.is_floating_point:
            assert torch.equal(ours, wanted), f"result {position}"
            continue
        scale = float(wanted.nan_to_num().abs().max()) if wanted.numel() else 1.0
        torch.testing.assert_close(
            ours,
            wanted,
            rtol=1e-4,
            atol=2e-5 * max(scale, 1e-3),
            equal_nan=True,
            msg=lambda m: f"result {position}: {m}",  # noqa: B023
        )
