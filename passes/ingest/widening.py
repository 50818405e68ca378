"""Writing a tensor in a wider float type."""

from torch_mlir import ir


def widened(value: ir.Value, element: ir.Type) -> ir.Value:
    """`value` with elements of the float type `element`, by a loop nest at the insertion point; itself when it has them."""
    kind = ir.RankedTensorType(value.type)
    if kind.element_type == element:
        return value
    result = ir.RankedTensorType.get(kind.shape, element)
    empty = ir.Operation.create("tensor.empty", results=[result])
    identity = ir.AffineMapAttr.get(ir.AffineMap.get_identity(kind.rank))
    parallel = ir.Attribute.parse("#linalg.iterator_type<parallel>")
    nest = ir.Operation.create(
        "linalg.generic",
        results=[result],
        operands=[value, empty.results[0]],
        attributes={
            "indexing_maps": ir.ArrayAttr.get([identity, identity]),
            "iterator_types": ir.ArrayAttr.get([parallel] * kind.rank),
            "operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, 1]),
        },
        regions=1,
    )
    body = nest.regions[0].blocks.append(kind.element_type, element)
    with ir.InsertionPoint(body):
        wide = ir.Operation.create("arith.extf", results=[element], operands=[body.arguments[0]])
        ir.Operation.create("linalg.yield", operands=[wide.results[0]])
    return nest.results[0]
