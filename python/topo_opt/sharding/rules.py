"""`sharding_rule(graph, node)`: what each operation of a structured function allows to be split.

Loop nests have one derivation from their indexing maps and iterator types (`rule_nests.py`), other ops a row of a table
(`rule_ops.py`), ATen calls one of another (`rule_aten.py`). Without a row an op is computed whole on every device.
"""

from __future__ import annotations

from topo_opt.sharding.rule import Rule
from topo_opt.sharding.rule_nests import nest_rule
from topo_opt.sharding.rule_ops import OPS, whole
from topo_opt.structured.graph import Graph, Node


def sharding_rule(graph: Graph, node: Node) -> Rule:
    """The factors of an op, and the dimensions that carry them.

    The operands are those of the node: the tensors that a body captures follow the ones that the op names.
    """
    if node.is_loop_nest:
        return nest_rule(graph, node)
    return OPS.get(node.name, whole)(graph, node)


def sharding_rules(graph: Graph) -> list[Rule]:
    """The rule of every node of a function, in order."""
    return [sharding_rule(graph, node) for node in graph.nodes]


# Made anew wherever they are read, so that no reader ties another one to its sharding.
FREE_OPS = ("arith.constant", "linalg.fill", "tensor.empty")
