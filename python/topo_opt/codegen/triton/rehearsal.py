"""An emitter that can say what a value needs before anything is written: products, statistics, and loads from memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from topo_opt.codegen.triton.emit import Emitter, Scalar, Value
from topo_opt.codegen.triton.writer import Writer
from topo_opt.structured.graph import Node
from topo_opt.structured.index import Expr, Opaque

Request = tuple[int, int, tuple[Expr, ...]]
"""A reduction that is needed: node, result position, result indices."""
Load = tuple[int, tuple[Expr, ...]]
"""An element of a kernel argument: its value number and indices."""


@dataclass
class Needs:
    """What was asked for, each once, in the order of asking."""

    reductions: list[Request] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    """Only loads whose address is known by now: no index that is itself loaded, no condition."""


@dataclass
class RehearsingEmitter(Emitter):
    """As `Emitter`, with `rehearse`."""

    _needs: Needs | None = None

    def rehearse(self, ask: Callable[[], object]) -> Needs:
        """What `ask` needs directly; seeded reductions need nothing more. Nothing is written and nothing remembered."""
        needs, before = Needs(), self._needs
        saved = self.axes

        def record(node: Node, position: int, indices: tuple[Expr, ...]) -> Scalar:
            request = (node.id, position, indices)
            if request not in needs.reductions:
                needs.reductions.append(request)
            element = self.graph.values[node.results[position]].element
            depends = frozenset().union(*(i.symbols for i in indices))
            return Value(f"pending{needs.reductions.index(request)}", element, depends)

        self._needs = needs
        try:
            with self.rehearsal(Writer(), record):
                ask()
        finally:
            self._needs, self.axes = before, saved
        return needs

    def load(self, number: int, indices: Sequence[Expr]) -> Scalar:
        found = (number, tuple(indices))
        needs = self._needs
        if (
            needs is not None
            and not self._predicates
            and not any(_is_loaded(i) for i in indices)
            and found not in needs.loads
        ):
            needs.loads.append(found)
        return super().load(number, indices)


def _is_loaded(index: Expr) -> bool:
    """Whether an index depends on a value that is known at run time only."""
    inner = (getattr(atom, "operand", None) for atom, _ in index.terms)
    return any(isinstance(atom, Opaque) for atom, _ in index.terms) or any(
        _is_loaded(i) for i in inner if i is not None
    )
