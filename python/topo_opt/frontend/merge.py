"""Puts the functions of several modules into one."""

from torch_mlir import ir


def merge_into(whole: ir.Module, part: ir.Module) -> None:
    """Copies every function of `part` to the end of `whole`, ATen declarations (`@aten.N`) under fresh numbers.

    Equal declarations are shared. Public names must differ. `part` is left as it was, but for its callees.
    """
    known = {
        _declaration(op): op.operation.attributes["sym_name"].value for op in whole.body if _is_private(op)
    }
    renamed: dict[str, str] = {}
    for op in part.body:
        if not _is_private(op):
            continue
        name = op.operation.attributes["sym_name"].value
        key = _declaration(op)
        if key not in known:
            known[key] = f"aten.{len(known)}"
            copy = op.operation.clone(ir.InsertionPoint.at_block_begin(whole.body))
            copy.attributes["sym_name"] = ir.StringAttr.get(known[key], whole.context)
        renamed[name] = known[key]

    def redirect(op: ir.Operation) -> ir.WalkResult:
        if op.name == "func.call":
            old = op.attributes["callee"].value
            op.attributes["callee"] = ir.FlatSymbolRefAttr.get(renamed[old], part.context)
        return ir.WalkResult.ADVANCE

    part.operation.walk(redirect)
    for op in part.body:
        if not _is_private(op):
            op.operation.clone(ir.InsertionPoint(whole.body))


def _is_private(op: ir.OpView) -> bool:
    attributes = op.operation.attributes
    return "sym_visibility" in attributes and attributes["sym_visibility"].value == "private"


def _declaration(op: ir.OpView) -> tuple[str, ...]:
    """Everything about a declaration but its name."""
    attributes = op.operation.attributes
    return tuple(sorted(f"{name} {attributes[name]}" for name in attributes if name != "sym_name"))
