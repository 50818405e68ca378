"""Attention kernels on a GPU: every tile of a sweep against float64 and against torch's scaled_dot_product_attention.

    python benchmarks/attention_kernels.py --prepare DIR     # writes kernels; needs the compiler
    python benchmarks/attention_kernels.py --run DIR         # measures them; needs torch, triton and a GPU only

Every launch of a measurement reads other copies of its inputs, together more than the L2 cache holds, as the layers of a
model do. torch's time is the fastest of its backends that take the case, measured in the same way.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attention_cases import CASES, Case, tiles

DTYPES = {
    "i64": "int64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "i32": "int32",
    "i1": "bool",
}
MLIR = {"bf16": "bf16", "fp16": "f16", "fp32": "f32", "i1": "i1"}
COLD_BYTES = 160 << 20
"""Inputs of one measurement together; the L2 cache of an H200 holds 50 MiB."""
WORKERS = 12


# -- here, with the compiler ----------------------------------------------------------------------------------------


def kernel_text(case: Case, name: str, tile: dict[str, int] | None) -> str:
    """The kernel function of a case."""
    kind = MLIR[case.dtype]
    shapes = [
        (case.b, case.h, case.m, case.d),
        (case.b, case.g, case.n, case.d),
        (case.b, case.g, case.n, case.d),
    ]
    types = [f"tensor<{'x'.join(map(str, s))}x{kind}>" for s in shapes]
    if case.mask:
        types.append(f"tensor<{'x'.join(map(str, case.mask))}xi1>")
    segments, bound = [1, 1, 1, int(case.mask is not None), int(case.position is not None)], ""
    if case.position is not None:
        types.append("tensor<1x1xi64>")
        bound = ", high = affine_map<(m, p) -> (p + 1)>"
    names = [f"%arg{i}" for i in range(len(types))]
    attributes = 'family = "attention"'
    if tile:
        attributes += f", tile = {{{', '.join(f'{k} = {v} : i64' for k, v in tile.items())}}}"
    return f"""func.func private @{name}({", ".join(f"{n}: {t}" for n, t in zip(names, types))}) -> {types[0]}
        attributes {{topo.kernel = {{{attributes}}}}} {{
      %0 = "topo.attention"({", ".join(names)}) {{causal = {str(case.causal).lower()}, scale = {case.d**-0.5!r} : f64, operandSegmentSizes = array<i32: {", ".join(map(str, segments))}>{bound}}} : ({", ".join(types)}) -> {types[0]}
      return %0 : {types[0]}
    }}"""


def prepare(folder: Path, only: str) -> None:
    """Writes one file a kernel and `index.json`, for the cases whose name contains `only`."""
    from torch_mlir import ir

    from topo_opt.codegen.triton import lower_kernel
    from topo_opt.codegen.triton.kernel import Kernel
    from topo_opt.codegen.triton.tiles import default_tile
    from topo_opt.dialects import load

    folder.mkdir(parents=True, exist_ok=True)
    index = []
    with ir.Context() as context, ir.Location.unknown():
        load(context)

        def parsed(text: str) -> Any:
            module = ir.Module.parse(text)
            return module, module.body.operations[0].operation

        for number, case in enumerate(CASES):
            if only not in case.name:
                continue
            _keep, op = parsed(kernel_text(case, "k", None))
            default = default_tile(Kernel(op))
            for tile in [default, *(t for t in tiles(case) if t != default)]:
                name = f"k{number}_" + "_".join(str(v) for v in tile.values())
                _keep, op = parsed(kernel_text(case, name, tile))
                source = lower_kernel(op)
                assert not source.problems(), source.problems()
                (folder / f"{name}.py").write_text(source.source)
                entry = asdict(source) | {
                    "file": f"{name}.py",
                    "case": number,
                    "tile": tile,
                    "default": tile == default,
                }
                del entry["source"]
                index.append(entry)
    (folder / "index.json").write_text(
        json.dumps({"cases": [asdict(c) for c in CASES], "kernels": index}, indent=1)
    )
    print(f"{len(index)} kernels of {len(CASES)} cases in {folder}")


# -- on the GPU machine -----------------------------------------------------------------------------------------------


def load_kernel(folder: Path, entry: dict[str, Any]) -> Any:
    """The jitted function of a prepared kernel."""
    path = folder / entry["file"]
    unique = f"kernel_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(unique, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    spec.loader.exec_module(module)
    return getattr(module, entry["name"])


def options(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry["constexprs"], "num_warps": entry["num_warps"], "num_stages": entry["num_stages"]}


def described(buffer: Any, param: dict[str, Any]) -> Any:
    """The argument for a parameter: the buffer, or a tensor descriptor of it."""
    if param["descriptor"] is None:
        return buffer
    from triton.tools.tensor_descriptor import TensorDescriptor

    made = param["descriptor"]
    return TensorDescriptor(buffer, made["shape"], made["strides"], made["block"])


def compile_one(task: tuple[str, dict[str, Any]]) -> str:
    """Compiles a kernel into Triton's cache; returns what went wrong."""
    import torch

    folder, entry = task
    from triton.runtime.jit import MockTensor

    kinds = [described(MockTensor(getattr(torch, DTYPES[p["dtype"]])), p) for p in entry["params"]]
    try:
        load_kernel(Path(folder), entry).warmup(*kinds, grid=tuple(entry["grid"]), **options(entry))
    except Exception as error:  # a tile that does not fit is a row of the table, not the end of the sweep
        return f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    return ""


def measure(launches: list[Callable[[], Any]]) -> float:
    """Microseconds a launch: the median over replays of a CUDA graph of all launches."""
    import torch

    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


class Inputs:
    """Copies of a case's inputs, and the float64 result of the first."""

    def __init__(self, case: Case):
        import torch

        torch.manual_seed(0)
        dtype = getattr(torch, DTYPES[case.dtype])
        self.case, self.sets = case, []
        for _ in range(min(64, max(4, -(-COLD_BYTES // case.nbytes)))):
            shapes = [(case.b, case.h, case.m, case.d)] + [(case.b, case.g, case.n, case.d)] * 2
            tensors = [torch.randn(s, device="cuda").to(dtype) for s in shapes]
            if case.mask:
                tensors.append(self._mask())
            if case.position is not None:
                tensors.append(torch.full((1, 1), case.position, device="cuda"))
            self.sets.append(tensors)
        self.exact = self._exact(*self.sets[0])

    def _mask(self) -> Any:
        import torch

        case = self.case
        if case.filled == "half":
            return (torch.arange(case.n, device="cuda") < case.n // 2).expand(case.mask).contiguous()
        if case.filled == "causal":
            return torch.ones(case.mask, dtype=torch.bool, device="cuda").tril()
        return torch.rand(case.mask, device="cuda") < 0.9

    def _exact(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        import torch

        case, group = self.case, self.case.h // self.case.g
        mask = seen(mask, case.n)
        out = torch.empty(q.shape, dtype=torch.float64, device="cuda")
        for b, h in itertools.product(range(case.b), range(case.h)):
            scores = q[b, h].double() @ k[b, h // group].double().T * case.d**-0.5
            if mask is not None:
                scores = scores.masked_fill(~mask[b if mask.shape[0] > 1 else 0, 0], -math.inf)
            if case.causal:
                scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            empty = (scores == -math.inf).all(-1, keepdim=True)
            out[b, h] = scores.softmax(-1).masked_fill(empty, 0.0) @ v[b, h // group].double()
        return out

    def error(self, result: Any) -> float:
        """Root mean square error against float64."""
        return (result.double() - self.exact).square().mean().sqrt().item()


def seen(given: Any, keys: int) -> Any:
    """A mask as torch takes it, from a mask or from the position of the last key."""
    import torch

    if given is None or given.dtype == torch.bool:
        return given
    return (torch.arange(keys, device=given.device) <= given)[None, None]


def torch_attention(inputs: Inputs) -> tuple[float, float, str]:
    """(microseconds, error, backend) of the fastest backend of scaled_dot_product_attention."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    case, best = inputs.case, (math.inf, math.nan, "none")
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):

        def call(tensors: list[Any]) -> Any:
            q, k, v, *mask = tensors
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                seen(mask[0], case.n) if mask else None,
                is_causal=case.causal,
                enable_gqa=case.h != case.g,
            )

        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                error = inputs.error(call(inputs.sets[0]))
                time = measure([lambda s=s: call(s) for s in inputs.sets])
        except RuntimeError:  # the backend does not take the case
            continue
        best = min(best, (time, error, name.split("_")[0].lower()))
    return best


def run(folder: Path, only: str) -> None:
    """Prints a table a case, fastest first; exits with 1 when a kernel is wrong."""
    import torch

    warnings.simplefilter("ignore")  # torch says at length why a backend does not take a case

    prepared = json.loads((folder / "index.json").read_text())
    cases = [Case(**{**c, "mask": tuple(c["mask"]) if c["mask"] else None}) for c in prepared["cases"]]
    kernels = [k for k in prepared["kernels"] if only in cases[k["case"]].name]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        problems = pool.map(compile_one, [(str(folder), k) for k in kernels], chunksize=1)
    wrong = 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for number, case in enumerate(cases):
        mine = [(k, p) for k, p in zip(kernels, problems) if k["case"] == number]
        if not mine:
            continue
        inputs = Inputs(case)
        theirs, allowed, backend = torch_attention(inputs)
        floor = 4 * torch.finfo(inputs.sets[0][0].dtype).eps * inputs.exact.square().mean().sqrt().item()
        allowed = max(2 * allowed, floor) if math.isfinite(allowed) else floor
        print(
            f"\n{case.name}: torch {theirs:.1f} us ({backend}), {_rate(case, theirs)}, {len(inputs.sets)} copies"
        )
        rows = []
        for entry, problem in mine:
            label = " ".join(f"{k}={v}" for k, v in entry["tile"].items()) + (
                " *" if entry["default"] else ""
            )
            if not problem:
                time, error, problem = _try(folder, entry, inputs)
            if problem:
                rows.append((math.inf, f"  {label:58s} {problem}"))
                continue
            verdict = "" if error <= allowed else f"  WRONG: error {error:.3g}, allowed {allowed:.3g}"
            wrong += bool(verdict)
            rows.append(
                (
                    time,
                    f"  {label:58s} {time:8.1f} us  {_rate(case, time)}  {theirs / time:5.2f}x torch{verdict}",
                )
            )
        for _, text in sorted(rows):
            print(text)
        del inputs
        torch.cuda.empty_cache()
    print(f"\n{wrong} wrong")
    sys.exit(bool(wrong))


def _try(folder: Path, entry: dict[str, Any], inputs: Inputs) -> tuple[float, float, str]:
    """(microseconds, error, problem) of a kernel; checks that a second launch gives the same bits."""
    import torch

    function, shape = load_kernel(folder, entry), inputs.exact.shape
    dtype = inputs.sets[0][0].dtype
    outs = [torch.full(shape, math.nan, dtype=dtype, device="cuda") for _ in inputs.sets]
    scratch = []
    for s in entry["scratch"]:
        kind = getattr(torch, DTYPES[s["dtype"]])
        scratch.append(torch.zeros(s["numel"], dtype=kind, device="cuda"))

    def launch(tensors: list[Any], out: Any) -> None:
        buffers = {"arg": tensors, "result": [out], "scratch": scratch}
        arguments = [described(buffers[p["kind"]][p["index"]], p) for p in entry["params"]]
        function[tuple(entry["grid"])](*arguments, **options(entry))

    try:
        launch(inputs.sets[0], outs[0])
        first = outs[0].clone()
        time = measure([lambda t=t, o=o: launch(t, o) for t, o in zip(inputs.sets, outs)])
    except Exception as error:  # out of resources: a row of the table
        return math.inf, math.inf, f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    same = torch.equal(first, outs[0])
    return time, inputs.error(outs[0]) if same else math.inf, ""


def _rate(case: Case, time: float) -> str:
    if case.is_decode:
        return f"{case.nbytes / time / 1e3:7.0f} GB/s"
    return f"{case.flops / time / 1e6:7.0f} TFLOP/s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare, arguments.only)
    if arguments.run:
        run(arguments.run, arguments.only)
    if not (arguments.prepare or arguments.run):
        parser.error("give --prepare or --run")


if __name__ == "__main__":
    main()
