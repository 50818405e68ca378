"""codegen.plan: aliases, in-place updates, order and memory, checked by running plans on symbolic values."""

import random
from dataclasses import replace

import numpy as np
import plan_samples as samples
import pytest

from topo_opt.codegen import dense
from topo_opt.codegen.kernel_source import KernelSource, Param, Scratch
from topo_opt.codegen.memory_plan import Lifetime, place
from topo_opt.codegen.plan import VariantRequest, _VariantPlanner
from topo_opt.codegen.plan_graph import Argument, Node, PlanGraph, Result, is_contiguous
from topo_opt.errors import CompilerCrash, UnsupportedError, UntrustedError
from topo_opt.runtime import plan as rt
from topo_opt.runtime import strict_json
from topo_opt.runtime.plan_check import from_json

N = 4


def step_names(variant):
    return [getattr(s, "kernel", s.tag) for s in variant.steps]


def only_variant(built):
    (function,) = built.plan.functions.values()
    (variant,) = function.variants
    return variant


def test_decode_updates_the_cache_in_place():
    built = samples.build(samples.CACHE_IR, samples.CACHE_KERNELS)
    variant = only_variant(built)
    assert step_names(variant) == ["k_add1", "k_update", "k_add", "view", "k_sum"]
    update = variant.steps[1]
    assert variant.buffers[update.writes[0]].name == "cache"
    assert [variant.buffers[b].name for b in variant.mutated_state] == ["cache"]
    assert built.copies == {"decode": []}
    assert (variant.arena_bytes, variant.naive_bytes, variant.zeroed_bytes) == (256, 256, 256)
    assert {b.kind for b in variant.buffers if b.shape == (4, 8)} == {"buffer", "constant", "output"}


def test_plan_json_round_trips_and_is_deterministic():
    texts = [
        strict_json.dumps(samples.build(samples.CACHE_IR, samples.CACHE_KERNELS).plan.to_json())
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    plan = from_json(strict_json.parse(texts[0], "plan.json"))
    assert strict_json.dumps(plan.to_json()) == texts[0]


def test_other_schema_is_refused_with_both_numbers():
    value = samples.build(samples.CACHE_IR, samples.CACHE_KERNELS).plan.to_json()
    with pytest.raises(UntrustedError, match=f"schema 99, this version reads schema {rt.SCHEMA}"):
        from_json(value | {"schema": 99})


UPDATE = """
func.func private @u(%d: tensor<4xf32>, %s: tensor<4xf32>) -> tensor<4xf32>
    attributes {topo.kernel = {family = "update"}, topo.inout = [[0, 0]]} { return %d : tensor<4xf32> }
func.func private @f(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32>
    attributes {topo.kernel = {family = "loops"}} { return %a : tensor<4xf32> }
func.func @main(%c: tensor<4xf32> {topo.kind = "buffer", topo.name = "c"},
                %p: tensor<4xf32> {topo.kind = "param", topo.name = "p"},
                %x: tensor<4xf32> {topo.kind = "input", topo.name = "x"})
    -> (RESULTS) attributes {topo.function = "main"} {
  BODY
}
"""
MUTATION = 'tensor<4xf32> {topo.kind = "mutation", topo.name = "c"}'
OUTPUT = 'tensor<4xf32> {topo.kind = "output"}'


def kernel(name, inputs, outputs=1):
    params = [Param(f"i{i}", "arg", i, "fp32") for i in range(inputs)]
    params += [Param(f"o{i}", "result", i, "fp32") for i in range(outputs)]
    arguments = ", ".join(p.name for p in params)
    source = f'"""k"""\n\nimport triton\n\n\n@triton.jit\ndef {name}({arguments}):\n    pass\n'
    return KernelSource(name, source, tuple(params), (1, 1, 1))


def plan_of(results, body):
    text = UPDATE.replace("RESULTS", ", ".join(results)).replace("BODY", body)
    built = samples.build(text, {"u": kernel("u", 2), "f": kernel("f", 2)})
    return only_variant(built), built.copies["main"]


def test_a_reader_of_the_old_value_is_moved_before_the_update():
    variant, copies = plan_of([MUTATION, OUTPUT], """
      %n = call @u(%c, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      %o = call @f(%c, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n, %o : tensor<4xf32>, tensor<4xf32>""")  # fmt: skip
    assert step_names(variant) == ["f", "u"] and not copies


def test_an_update_whose_old_value_is_needed_later_copies_first():
    variant, copies = plan_of([MUTATION, OUTPUT], """
      %n = call @u(%c, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      %o = call @f(%c, %n) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n, %o : tensor<4xf32>, tensor<4xf32>""")  # fmt: skip
    assert step_names(variant) == ["copy", "u", "f", "copy"]
    assert [c.reason for c in copies] == ["the old value is read after the new one"]


def test_a_parameter_is_never_written():
    variant, copies = plan_of([OUTPUT], """
      %n = call @u(%p, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n : tensor<4xf32>""")  # fmt: skip
    assert step_names(variant) == ["copy", "u"] and copies[0].reason == "it may not be written"
    assert all(variant.buffers[w].kind == "output" for s in variant.steps for w in rt.written(s))


def test_state_that_is_not_mutated_is_never_written():
    variant, _ = plan_of([OUTPUT], """
      %n = call @u(%c, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n : tensor<4xf32>""")  # fmt: skip
    assert variant.mutated_state == ()


def test_a_new_value_is_produced_in_its_state_buffer():
    variant, _ = plan_of([MUTATION], """
      %n = call @f(%p, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n : tensor<4xf32>""")  # fmt: skip
    assert step_names(variant) == ["f"]
    assert [variant.buffers[w].name for w in variant.steps[0].writes] == ["c"]


def test_a_kernel_that_reads_the_state_it_replaces_writes_elsewhere():
    variant, _ = plan_of([MUTATION], """
      %n = call @f(%c, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n : tensor<4xf32>""")  # fmt: skip
    assert step_names(variant) == ["f", "copy"]


def test_the_same_value_returned_twice_is_computed_once():
    variant, _ = plan_of([OUTPUT, OUTPUT], """
      %n = call @f(%p, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %n, %n : tensor<4xf32>, tensor<4xf32>""")  # fmt: skip
    # Both results name themselves by position.
    assert step_names(variant) == ["f"] and variant.outputs[0].buffer == variant.outputs[1].buffer


def test_an_empty_tensor_needs_no_kernel():
    text = """
func.func private @f(%a: tensor<0xf32>) -> tensor<0xf32> attributes {topo.kernel = {family = "loops"}} { return %a : tensor<0xf32> }
func.func @main(%x: tensor<0xf32> {topo.kind = "input", topo.name = "x"}) -> (tensor<0xf32> {topo.kind = "output"})
    attributes {topo.function = "main"} {
  %n = call @f(%x) : (tensor<0xf32>) -> tensor<0xf32>
  return %n : tensor<0xf32>
}"""
    built = samples.build(text, {})
    assert only_variant(built).steps == () and built.plan.kernels == {}


def test_an_op_that_is_no_step_is_named():
    with pytest.raises(UnsupportedError, match=r"arith\.addf can't stand in a plan function"):
        plan_of([OUTPUT], "%n = arith.addf %p, %x : tensor<4xf32>\n return %n : tensor<4xf32>")


def test_a_source_that_does_not_match_its_launch_is_refused():
    bad = replace(samples.CACHE_KERNELS["k_add"], constexprs={"N": 32})
    with pytest.raises(CompilerCrash, match="k_add takes"):
        samples.build(samples.CACHE_IR, samples.CACHE_KERNELS | {"k_add": bad})


def test_a_strided_slice_is_packed_and_a_contiguous_one_is_a_view():
    text = """
func.func private @f(%a: tensor<2xf32>) -> tensor<2xf32> attributes {topo.kernel = {family = "loops"}} { return %a : tensor<2xf32> }
func.func @main(%x: tensor<4x2xf32> {topo.kind = "input", topo.name = "x"})
    -> (tensor<2xf32> {topo.kind = "output"}, tensor<2xf32> {topo.kind = "output"}) attributes {topo.function = "main"} {
  %row = tensor.extract_slice %x[2, 0] [1, 2] [1, 1] : tensor<4x2xf32> to tensor<2xf32>
  %column = tensor.extract_slice %x[1, 1] [2, 1] [2, 1] : tensor<4x2xf32> to tensor<2xf32>
  %a = call @f(%row) : (tensor<2xf32>) -> tensor<2xf32>
  %b = call @f(%column) : (tensor<2xf32>) -> tensor<2xf32>
  return %a, %b : tensor<2xf32>, tensor<2xf32>
}"""
    variant = only_variant(samples.build(text, {"f": kernel("f", 1)}))
    views = [(s.offset, s.strides) for s in variant.steps if s.tag == "view"]
    assert sorted(views) == [(3, (4,)), (4, (1,))]
    assert [s.tag for s in variant.steps].count("copy") == 1


CONSTANTS = [
    ("dense<[1.5, -0.0]> : tensor<2xbf16>", "bfloat16", [0x3FC0, 0x8000]),
    ("dense<0x7F80> : tensor<2xbf16>", "bfloat16", [0x7F80, 0x7F80]),
    ("dense<[true, false]> : tensor<2xi1>", "bool", [True, False]),
    ("dense<[-1, 9223372036854775807]> : tensor<2xi64>", "int64", [-1, 9223372036854775807]),
    ("dense<[(1.0, 2.0), (0.5, -3.0)]> : tensor<2xcomplex<f32>>", "complex64", [1 + 2j, 0.5 - 3j]),
    ("dense<[0.1, 0x7FC00000]> : tensor<2xf32>", "float32", [np.float32(0.1), np.float32("nan")]),
]


@pytest.mark.parametrize(("text", "dtype", "expected"), CONSTANTS, ids=[c[0][:24] for c in CONSTANTS])
def test_constants_keep_their_bits(text, dtype, expected):
    from torch_mlir import ir

    with ir.Context(), ir.Location.unknown():
        attribute = text if "complex" in text else ir.Attribute.parse(text)
        values = dense.dense_values(attribute, dtype, (2,))
    want = np.array(expected, dtype=values.dtype)
    assert np.ascontiguousarray(values).tobytes() == want.tobytes()


def test_placement_never_overlaps_and_beats_naive():
    generator = random.Random(7)
    for _ in range(50):
        lives = []
        for _ in range(generator.randrange(1, 40)):
            start = generator.randrange(30)
            lives.append(Lifetime(generator.randrange(0, 5000), start, start + generator.randrange(6)))
        placed = place(lives)
        for i, a in enumerate(lives):
            assert placed.offsets[i] % 256 == 0 and placed.offsets[i] + a.nbytes <= placed.peak
            for j, b in enumerate(lives[:i]):
                if a.first <= b.last and b.first <= a.last and a.nbytes and b.nbytes:
                    x, y = placed.offsets[i], placed.offsets[j]
                    assert x + a.nbytes <= y or y + b.nbytes <= x
        assert placed.peak <= placed.naive


def random_graph(generator):
    """A functional program over vectors of N elements, with in-place kernels, views, mutations and repeated results."""
    graph = PlanGraph("main")
    for i, kind in enumerate(["buffer", "buffer", "buffer", "input", "input", "param"]):
        value = graph.new_value("float64", (N,))
        graph.arguments.append(Argument(kind, f"a{i}", value.index))
    live = [a.value for a in graph.arguments]
    for n in range(generator.randrange(1, 14)):
        source = graph.values[generator.choice(live)]
        if generator.random() < 0.2:
            shape, strides = ((2, 2), (2, 1)) if source.shape == (N,) else ((N,), (1,))
            live.append(graph.new_view(source, shape, source.offset, strides).index)
            continue
        count = generator.randrange(1, 4)
        inputs = [generator.choice(live) for _ in range(count)]
        shapes = [graph.values[v].shape for v in inputs]
        inout = ((0, 0),) if generator.random() < 0.5 else ()
        outputs = [graph.new_value("float64", shapes[0] if inout else (N,)).index]
        if generator.random() < 0.2:
            outputs.append(graph.new_value("float64", (N,)).index)
        kind = "aten" if generator.random() < 0.15 and not inout else "kernel"
        graph.nodes.append(
            Node(
                kind,
                inputs,
                outputs,
                kernel=f"k{n}",
                inout=inout,
                op=f"k{n}",
                input_dtypes=("float64",) * count,
            )
        )
        live += outputs
    for i in range(3):
        if generator.random() < 0.7:
            value = generator.choice(live)
            graph.results.append(Result("mutation", f"a{i}", "float64", value))
    for i in range(generator.randrange(1, 4)):
        graph.results.append(Result("output", str(i), "float64", generator.choice(live)))
    return graph


def functional(graph):
    """Value number -> symbol, by the program's meaning; and the final state and outputs."""
    symbols = {a.value: hash(("arg", a.name)) for a in graph.arguments}

    def of(v):
        return symbols[graph.values[v].root]

    for n in graph.nodes:
        for i, o in enumerate(n.outputs):
            symbols[o] = hash((n.kernel, i, *(of(v) for v in n.inputs)))
    state = {a.name: symbols[a.value] for a in graph.arguments}
    state |= {r.name: of(r.value) for r in graph.results if r.kind == "mutation"}
    return state, [of(r.value) for r in graph.results if r.kind == "output"]


def simulate(variant):
    """Runs a plan where each element of a buffer is the symbol of the value it belongs to."""
    arena = np.zeros(variant.arena_bytes // 8 + 1, dtype=np.int64)
    memory = []
    for b in variant.buffers:
        if b.kind == "temp":
            memory.append(arena[b.offset // 8 : b.offset // 8 + b.numel])
        else:
            memory.append(np.full(b.numel, hash(("arg", b.name)) if b.name else 0, dtype=np.int64))

    def read(b):
        assert len(set(memory[b].tolist())) == 1, "a value is partly overwritten"
        return int(memory[b][0])

    for s in variant.steps:
        if s.tag == "view":
            memory[s.out] = memory[s.base]
        elif s.tag == "copy":
            memory[s.dst][:] = read(s.src)
        elif s.tag == "aten":
            symbols = [read(b) for b in s.inputs]
            for i, b in enumerate(s.outputs):
                memory[b][:] = hash((s.op, i, *symbols))
        else:
            count = int(s.kernel.split("_")[1])
            inputs, outputs = s.buffers[:count], s.buffers[count:]
            symbols = [read(b) for b in inputs]
            shared = [
                i
                for i, b in enumerate(inputs)
                if any(np.shares_memory(memory[b], memory[o]) for o in outputs)
            ]
            allowed = [0] if s.kernel.endswith("_inout") else []
            assert shared == shared[:1] and (not shared or shared == allowed), "reads what it writes"
            for i, b in enumerate(outputs):
                memory[b][:] = hash((s.kernel.split("_")[0], i, *symbols))
    state = {b.name: read(i) for i, b in enumerate(variant.buffers) if b.kind in ("buffer", "input", "param")}
    return state, [read(o.buffer) for o in variant.outputs]


@pytest.mark.parametrize("seed", range(8))
def test_plans_mean_what_the_program_means(seed):
    generator = random.Random(seed)
    for _ in range(100):
        graph = random_graph(generator)
        expected = functional(graph)
        sources = {}
        for n in graph.nodes:
            name = f"{n.kernel}_{len(n.inputs)}{'_inout' if n.inout else ''}"
            sources[name] = kernel(name, len(n.inputs), len(n.outputs))
            n.kernel, n.op = name, n.op
        variant = _VariantPlanner(graph, VariantRequest("main", "main"), sources, {}).plan()
        state, outputs = simulate(variant)
        assert outputs == expected[1]
        assert state == expected[0]


def counting(name, scratch):
    params = (
        Param("i", "arg", 0, "fp32"),
        *(Param(f"s{n}", "scratch", n, s.dtype) for n, s in enumerate(scratch)),
    )
    return replace(kernel(name, 1), params=(*params, Param("o", "result", 0, "fp32")), scratch=scratch, source=(
        f'"""k"""\n\nimport triton\n\n\n@triton.jit\ndef {name}({", ".join(p.name for p in params)}, o):\n    pass\n'
    ))  # fmt: skip


def test_launches_share_the_zeroed_scratch_and_nothing_zeroes_it():
    text = UPDATE.replace("RESULTS", OUTPUT).replace(
        "BODY",
        """
      %a = call @f(%c, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      %b = call @f(%a, %x) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      return %b : tensor<4xf32>""",
    )
    scratch = (Scratch("i32", 100, True), Scratch("fp32", 7), Scratch("i32", 3, True))
    variant = only_variant(samples.build(text, {"f": counting("f", scratch)}))
    assert step_names(variant) == ["f", "f"]
    zeroed = [b for b in variant.buffers if b.kind == "zeroed"]
    assert [(b.offset, b.numel) for b in zeroed] == [(0, 100), (512, 3)] * 2
    assert variant.zeroed_bytes == 768
    assert all(0 < b.nbytes <= variant.arena_bytes for b in variant.buffers if b.kind == "temp")


def test_only_kernels_may_have_zeroed_scratch():
    value = samples.build(samples.CACHE_IR, samples.CACHE_KERNELS).plan.to_json()
    variant = value["functions"]["decode"]["variants"][0]
    at = next(i for i, b in enumerate(variant["buffers"]) if b["kind"] == "zeroed")
    copy = {"step": "copy", "src": at, "dst": at}
    with pytest.raises(UntrustedError, match=r"uses the scratch .* of kernels"):
        from_json(value | {"functions": {"decode": value["functions"]["decode"] | {
            "variants": [variant | {"steps": [*variant["steps"], copy]}]}}})  # fmt: skip
    with pytest.raises(UntrustedError, match="after zeroed_bytes"):
        from_json(value | {"functions": {"decode": value["functions"]["decode"] | {
            "variants": [variant | {"zeroed_bytes": 0}]}}})  # fmt: skip


def test_contiguity_ignores_unit_dims():
    assert (
        is_contiguous((1, 3), (99, 1)) and not is_contiguous((2, 3), (1, 2)) and is_contiguous((0, 3), (7, 7))
    )
