"""`topo-propagate-shardings`: shardings for everything that none was chosen for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from topo_opt.errors import InputError
from topo_opt.passes.base import Pass, PassFailure
from topo_opt.sharding.annotate import lift, read_mesh, write, write_mesh
from topo_opt.sharding.named import annotate_names, keep_results_whole, parse_mesh, parse_patterns
from topo_opt.sharding.propagate import propagate
from topo_opt.topology import load


@dataclass(frozen=True)
class PropagateShardings(Pass):
    """Annotates every tensor of the functions of a module with a sharding of its grid, from those that are annotated.

    `%y = shard.shard %x to %s` says how a tensor lies, with `annotate_for_users` how its readers take it. Annotated tensors
    stay as they are; the rest follows by the rules of the ops, weights before activations. A module without a grid is left alone.

    `mesh` (`data=2,model=4`) makes the grid, of the first devices of the machine `topology` where that is given. `shard` (`layers.*.q.weight=model,_;input_ids=data,_`) annotates arguments
    and results by their names: for each dimension the axes that split it, `+` between several, `_` for none. With `results = whole` the
    results that nothing else is said of are gathered for the caller.
    """

    name = "topo-propagate-shardings"
    mesh: str | None = None
    shard: str = ""
    results: str = "open"
    topology: str | None = None

    def apply(self, module: Any) -> None:
        try:
            self._apply(module.operation)
        except InputError as error:
            location = getattr(error, "location", module.operation.location)
            raise PassFailure(error.message, hint=error.hint, location=location) from error

    def _apply(self, module: Any) -> None:
        if self.results not in ("open", "whole"):
            raise InputError(f"option 'results' is '{self.results}'", hint="expected open or whole")
        if self.mesh:
            known = read_mesh(module)
            mesh = parse_mesh(self.mesh, () if self.topology is None else load(self.topology).compute)
            if known is None or known.axes != mesh.axes:
                write_mesh(module, mesh)
        mesh_or_none = read_mesh(module)
        if mesh_or_none is None:
            if self.shard:
                raise InputError(
                    "tensors are to be split, but there is no mesh", hint="give a mesh, such as mesh=model=2"
                )
            return
        mesh = mesh_or_none
        functions = [lift(func, mesh) for func in shardable(module)]
        annotate_names(functions, parse_patterns(self.shard), mesh)
        if self.results == "whole":
            for graph, annotations in functions:
                keep_results_whole(graph, annotations)
        found = propagate(functions, mesh)
        for (graph, _), annotations in zip(functions, found, strict=True):
            with graph.func.context, graph.func.location:
                write(graph, annotations, mesh)


def shardable(module: Any) -> list[Any]:
    """The functions of a module that have a body and are no kernels."""
    return [
        view.operation
        for view in module.regions[0].blocks[0].operations
        if view.operation.name == "func.func"
        and view.operation.regions[0].blocks
        and "topo.kernel" not in view.operation.attributes
    ]
