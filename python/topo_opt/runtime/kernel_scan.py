"""Checks that a kernel file is nothing but Triton functions, before it is executed as Python.

A bundle may come from anywhere, and its hashes only say that it arrived whole. A kernel file may import from a short list,
define `@triton.jit` functions and name constants; its functions may only use their own names, a few built-in functions and
the public names of `triton.language`. So the worst that a kernel can do is what a GPU kernel can do.
"""

from __future__ import annotations

import ast

from topo_opt.errors import UntrustedError

IMPORTS = frozenset({
    "import triton",
    "import triton.language as tl",
    "from triton.language.extra import libdevice",
    "from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait",
    "from triton.language.extra.cuda import gdc_launch_dependents",
    "from triton.language.extra.cuda import gdc_wait",
    "from triton.language.extra.cuda import gdc_wait, gdc_launch_dependents",
})  # fmt: skip
BUILTINS = frozenset(
    {"range", "min", "max", "float", "int", "bool", "abs", "len", "tuple", "True", "False", "None"}
)
MEMBERS = frozenset({
    "T", "dtype", "element_ty", "shape", "value", "type", "to", "cast", "numel", "primitive_bitwidth", "load", "store",
    "gather", "scatter", "atomic_add", "atomic_max", "atomic_min", "reshape", "view", "trans", "permute", "ravel", "split", "join",
    "broadcast_to", "expand_dims", "sum", "max", "min", "argmax", "argmin", "cumsum", "cumprod", "abs", "exp", "exp2", "log",
    "log2", "sqrt", "rsqrt", "sin", "cos", "sigmoid", "softmax", "reduce", "associative_scan", "flip", "logical_and", "logical_or",
})  # fmt: skip
"""What may be read of a tensor, a descriptor or a dtype."""
NAMESPACES = ("math", "PropagateNan")
"""Members of `tl` whose members may be used in turn."""
MODULES = ("core", "extra", "random", "semantic", "standard", "target_info")
TRITON = frozenset({"jit", "cdiv", "next_power_of_2"})
_DECORATORS = (["triton.jit"], ["triton.jit()"], ["triton.jit(noinline=True)"])
_TOP = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr)
_BANNED = (
    ast.FunctionDef,
    ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal,
    ast.Try, ast.With, ast.AsyncWith, ast.Delete, ast.Import, ast.ImportFrom, ast.JoinedStr, ast.Raise, ast.NamedExpr,
)  # fmt: skip
MAX_BYTES = 4 << 20
MAX_NODES = 200_000


def check(source: bytes, file: str) -> str:
    """The text of a kernel file; raises `UntrustedError` that names line and construct."""
    if len(source) > MAX_BYTES:
        raise UntrustedError(f"{file} is {len(source)} bytes, kernel files may have {MAX_BYTES}")
    try:
        text = source.decode("utf-8")
        tree = ast.parse(text, file)
        if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
            raise UntrustedError(f"{file} is too large for a kernel")
        _Scan(file).module(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UntrustedError(f"{file} is not a Python file: {error}") from None
    return text


class _Scan:
    def __init__(self, file: str):
        self.file = file
        self.globals: set[str] = set()

    def refuse(self, node: ast.AST, what: str) -> None:
        raise UntrustedError(
            f"{self.file}:{getattr(node, 'lineno', 1)}: {what} may not stand in a kernel file"
        )

    def module(self, tree: ast.Module) -> None:
        for node in tree.body:
            if not isinstance(node, _TOP):
                self.refuse(node, type(node).__name__)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                if ast.unparse(node) not in IMPORTS:
                    self.refuse(node, ast.unparse(node)[:80])
                self.globals |= {a.asname or a.name for a in node.names}
            elif isinstance(node, ast.Expr):
                if not (isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)):
                    self.refuse(node, "an expression")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                self.assignment(node)
            elif isinstance(node, ast.FunctionDef):
                self.globals.add(node.name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.function(node)

    def assignment(self, node: ast.Assign | ast.AnnAssign) -> None:
        """`NAME = 1`, `NAME: tl.constexpr = 1` or `NAME = tl.constexpr(1)`."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "tl.constexpr" and len(value.args) == 1:
            value = value.args[0]
        if isinstance(value, ast.UnaryOp):
            value = value.operand
        named = len(targets) == 1 and isinstance(targets[0], ast.Name) and not targets[0].id.startswith("_")
        typed = isinstance(node, ast.Assign) or ast.unparse(node.annotation) == "tl.constexpr"
        if not (named and typed and isinstance(value, ast.Constant)):
            self.refuse(node, "this assignment")
        if ast.unparse(targets[0]) in ("tl", "triton", "libdevice"):
            self.refuse(node, "a new meaning of an imported name")
        self.globals.add(ast.unparse(targets[0]))

    def function(self, node: ast.FunctionDef) -> None:
        if node.name in ("tl", "triton", "libdevice"):
            self.refuse(node, "a new meaning of an imported name")
        if [ast.unparse(d) for d in node.decorator_list] not in _DECORATORS:
            self.refuse(node, f"the function {node.name} without @triton.jit alone")
        a = node.args
        if a.vararg or a.kwarg or a.kwonlyargs or a.posonlyargs:
            self.refuse(node, "a parameter that is not a plain one")
        for default in a.defaults:
            if not isinstance(default, ast.Constant):
                self.refuse(default, "a default that is not a literal")
        for arg in a.args:
            if arg.annotation is not None and ast.unparse(arg.annotation) != "tl.constexpr":
                self.refuse(arg, "an annotation other than tl.constexpr")
        local = {arg.arg for arg in a.args}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                local.add(inner.id)
        if shadowed := local & (self.globals | BUILTINS):
            self.refuse(node, f"a new meaning of {sorted(shadowed)[0]}")
        for statement in node.body:
            self.body(statement, local)

    def body(self, root: ast.AST, local: set[str]) -> None:
        for node in ast.walk(root):
            if isinstance(node, _BANNED):
                self.refuse(node, type(node).__name__)
            if isinstance(node, ast.Name) and node.id.startswith("__"):
                self.refuse(node, f"the name {node.id}")
            if isinstance(node, ast.Name) and node.id not in local | self.globals | BUILTINS:
                self.refuse(node, f"the name {node.id}")
            if isinstance(node, ast.Attribute):
                self.attribute(node)

    def attribute(self, node: ast.Attribute) -> None:
        path = _dotted(node)
        if node.attr.startswith("_") or isinstance(node.ctx, ast.Store):
            self.refuse(node, f"the attribute {node.attr[:80]}")
        root, names = path[0], path[1:]
        if root == "triton":
            good = len(names) == 1 and names[0] in TRITON
        elif root == "libdevice":
            good = len(names) == 1
        elif root == "tl":
            # tl.float32.x and deeper would reach methods of the compiler's own objects.
            good = names[0] not in MODULES and (
                len(names) == 1 or (len(names) == 2 and names[0] in NAMESPACES)
            )
        else:
            good = node.attr in MEMBERS
        if not good:
            self.refuse(node, ".".join(path)[:80] if root else f"the attribute {node.attr[:80]}")


def _dotted(node: ast.Attribute) -> list[str]:
    """`tl.math.exp` -> ["tl", "math", "exp"]; the first is "" when the chain doesn't start at a name."""
    names: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    names.append(inner.id if isinstance(inner, ast.Name) else "")
    return names[::-1]
