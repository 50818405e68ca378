"""What `topo-opt` says about itself: versions, passes, the dialect as IRDL."""

import inspect
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args, get_origin

from topo_opt.passes import all_passes
from topo_opt.passes.base import Pass, option_types


def versions() -> str:
    """One line per tool and library that a compile depends on."""
    lines = []
    for name in ("topo-opt", "torch-mlir", "torch", "triton"):
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} not installed")
    return "\n".join(lines)


def passes() -> str:
    """Every pass: ours with documentation and options, then the C++ ones with their summaries."""
    from topo_opt.pipeline.upstream import upstream_passes

    ours = "\n".join(line for cls in all_passes() for line in _describe(cls))
    theirs = "\n".join(f"  {name:<40} {summary}" for name, summary in upstream_passes().items())
    return f"Passes of topo-opt:\n{ours}\n\nC++ passes:\n{theirs}"


def _describe(cls: type[Pass]) -> Iterator[str]:
    summary, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n")
    yield f"  {cls.name:<40} {summary}"
    yield from (f"      {line}" if line else "" for line in rest.strip().splitlines())
    types = option_types(cls)
    for field in fields(cls):
        yield f"    {field.name.replace('_', '-')}=<{_type_name(types[field.name])}> (default {field.default!r})"


def _type_name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)


def irdl() -> str:
    """The topo dialect in IRDL: the text that `--irdl-file` of other MLIR tools takes."""
    from torch_mlir import ir

    from topo_opt import dialects
    from topo_opt.dialects.topo import Topo

    with dialects.load(ir.Context()):
        return str(Topo._mlir_module).rstrip()


def topology_schema() -> str:
    """The JSON Schema of a topology file."""
    from topo_opt import topology

    return topology.json_schema()
