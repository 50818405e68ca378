"""Hand-written kernel IR and Triton sources that the plan, bundle and runtime tests share."""

from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch

HEADER = '"""{doc}"""\n\nimport triton\nimport triton.language as tl\n\n\n'

ADD_SOURCE = (
    HEADER.format(doc="x + y")
    + """@triton.jit
def {name}(x, y, out, N: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    a = tl.load(x + i, mask=i < N, other=0).to(tl.float32)
    b = tl.load(y + i, mask=i < N, other=0).to(tl.float32)
    tl.store(out + i, (a + b).to(out.dtype.element_ty), mask=i < N)
"""
)

UPDATE_SOURCE = (
    HEADER.format(doc="dest[index[i]] = source[i] along dim 0")
    + """@triton.jit
def {name}(dest, source, index, W: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.load(index + row)
    i = tl.arange(0, B)
    tl.store(dest + at * W + i, tl.load(source + row * W + i, mask=i < W), mask=i < W)
"""
)

COUNT_SOURCE = (
    HEADER.format(doc="sum of x, through a zeroed scratch")
    + """@triton.jit
def {name}(x, total, out, N: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    s = tl.sum(tl.load(x + i, mask=i < N, other=0).to(tl.float32), 0)
    tl.store(total, tl.load(total) + s)
    tl.store(out, tl.load(total))
    tl.store(total, 0.0)
"""
)


def add_kernel(name: str, dtype: str, numel: int, block: int = 64) -> KernelSource:
    """out = x + y on `numel` elements."""
    return KernelSource(
        name, ADD_SOURCE.replace("{name}", name),
        (Param("x", "arg", 0, dtype), Param("y", "arg", 1, dtype), Param("out", "result", 0, dtype)),
        (-(-numel // block), 1, 1), constexprs={"N": numel, "B": block}, family="loops",
    )  # fmt: skip


def update_kernel(name: str, dtype: str, width: int, rows: int, block: int = 16) -> KernelSource:
    """dest[index] = source, in place."""
    return KernelSource(
        name, UPDATE_SOURCE.replace("{name}", name),
        (Param("dest", "result", 0, dtype), Param("source", "arg", 1, dtype), Param("index", "arg", 2, "i64")),
        (rows, 1, 1), constexprs={"W": width, "B": block}, family="update",
    )  # fmt: skip


def sum_kernel(name: str, numel: int) -> KernelSource:
    """out = sum(x), a scalar, using one zeroed scratch element, which is zero again afterwards."""
    return KernelSource(
        name, COUNT_SOURCE.replace("{name}", name),
        (Param("x", "arg", 0, "fp32"), Param("total", "scratch", 0, "fp32"), Param("out", "result", 0, "fp32")),
        (1, 1, 1), constexprs={"N": numel, "B": 64}, scratch=(Scratch("fp32", 1, True),), family="loops",
    )  # fmt: skip


CACHE_IR = """
func.func private @k_add(%a: tensor<4x8xf32>, %b: tensor<4x8xf32>) -> tensor<4x8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<4x8xf32> }
func.func private @k_add1(%a: tensor<1x8xf32>, %b: tensor<1x8xf32>) -> tensor<1x8xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<1x8xf32> }
func.func private @k_update(%d: tensor<4x8xf32>, %s: tensor<1x8xf32>, %i: tensor<1xi64>) -> tensor<4x8xf32>
    attributes {topo.kernel = {family = "update"}, topo.inout = [[0, 0]]} { return %d : tensor<4x8xf32> }
func.func private @k_sum(%a: tensor<32xf32>) -> tensor<f32>
    attributes {topo.kernel = {family = "loops"}} { %c = arith.constant dense<0.0> : tensor<f32> return %c : tensor<f32> }
func.func @decode(%w: tensor<1x8xf32> {topo.kind = "param", topo.name = "bias", topo.dtype = "float32"},
                  %cache: tensor<4x8xf32> {topo.kind = "buffer", topo.name = "cache", topo.dtype = "float32"},
                  %x: tensor<1x8xf32> {topo.kind = "input", topo.name = "x", topo.dtype = "float32"},
                  %pos: tensor<1xi64> {topo.kind = "input", topo.name = "pos", topo.dtype = "int64"})
    -> (tensor<4x8xf32> {topo.kind = "mutation", topo.name = "cache", topo.dtype = "float32"},
        tensor<4x8xf32> {topo.kind = "output", topo.name = "0", topo.dtype = "float32"},
        tensor<f32> {topo.kind = "output", topo.name = "1", topo.dtype = "float32"})
    attributes {topo.function = "decode", topo.bucket = {}} {
  %c = arith.constant dense<1.0> : tensor<4x8xf32>
  %y = call @k_add1(%x, %w) : (tensor<1x8xf32>, tensor<1x8xf32>) -> tensor<1x8xf32>
  %n = call @k_update(%cache, %y, %pos) : (tensor<4x8xf32>, tensor<1x8xf32>, tensor<1xi64>) -> tensor<4x8xf32>
  %o = call @k_add(%n, %c) : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
  %f = tensor.collapse_shape %o [[0, 1]] : tensor<4x8xf32> into tensor<32xf32>
  %s = call @k_sum(%f) : (tensor<32xf32>) -> tensor<f32>
  return %n, %o, %s : tensor<4x8xf32>, tensor<4x8xf32>, tensor<f32>
}
"""

CACHE_KERNELS = {
    "k_add": add_kernel("k_add", "fp32", 32),
    "k_add1": add_kernel("k_add1", "fp32", 8),
    "k_update": update_kernel("k_update", "fp32", 8, 1),
    "k_sum": sum_kernel("k_sum", 32),
}


def build(ir_text: str, kernels: dict, **options):
    """Parses kernel IR and plans it."""
    from torch_mlir import ir

    from topo_opt.codegen.plan import build_plan

    with ir.Context(), ir.Location.unknown():
        return build_plan(ir.Module.parse(ir_text), kernels, **options)
