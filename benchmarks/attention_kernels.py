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
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Case:
    """One attention: sizes, causal or not, the shape of a boolean mask and what it allows."""

    name: str
    b: int
    h: int
    g: int
    m: int
    n: int
    d: int
    causal: bool = False
    mask: tuple[int, int, int, int] | None = None
    filled: str = "random"
    """What the mask allows: "random" (nine of ten), "half" of the keys, or "causal"."""
    dtype: str = "bf16"
    position: int | None = None
    """The last key that is filled, which the kernel reads from memory (instead of a mask)."""

    @property
    def flops(self) -> float:
        """Multiplications and additions that the result needs."""
        triangle = self.causal or self.filled == "causal"
        seen = self.m * (self.m + 1) / 2 if triangle else self.m * self.n
        return 4.0 * self.b * self.h * seen * self.d

    @property
    def nbytes(self) -> int:
        """Bytes that must be read and written once."""
        item = 4 if self.dtype == "fp32" else 2
        keys = self.n // 2 if self.filled == "half" else self.n
        keys = keys if self.position is None else self.position + 1
        elements = 2 * self.b * self.h * self.m * self.d + 2 * self.b * self.g * keys * self.d
        return item * elements + math.prod(self.mask or (0,))

    @property
    def is_decode(self) -> bool:
        return self.m <= 16


def _decode(model: str, depth: int, keys: int, batches: Iterable[int], filled: str = "random") -> list[Case]:
    return [
        Case(
            f"{model} decode b{b} n{keys} {filled}",
            b,
            32,
            8,
            1,
            keys,
            depth,
            mask=(b, 1, 1, keys),
            filled=filled,
        )
        for b in batches
    ]


CASES = [
    Case("llama-1b prefill", 1, 32, 8, 2048, 2048, 64, causal=True),
    Case("llama-1b prefill, causal mask", 1, 32, 8, 2048, 2048, 64, mask=(1, 1, 2048, 2048), filled="causal"),
    Case("llama-8b prefill", 1, 32, 8, 2048, 2048, 128, causal=True),
    Case("llama-8b prefill of 8192", 1, 32, 8, 8192, 8192, 128, causal=True),
    Case("llama-8b prefill of 700", 1, 32, 8, 700, 700, 128, causal=True),
    Case("phi-3 prefill, depth 96", 1, 32, 32, 2048, 2048, 96, causal=True),
    Case("gemma prefill, depth 256", 1, 8, 4, 2048, 2048, 256, causal=True),
    Case("bert row mask", 8, 12, 12, 512, 512, 64, mask=(8, 1, 1, 512)),
    Case("bert square mask", 8, 12, 12, 512, 512, 64, mask=(8, 1, 512, 512)),
    Case("whisper encoder", 4, 20, 20, 1500, 1500, 64),
    Case("vit-h depth 80", 8, 16, 16, 257, 257, 80),
    Case("f32, depth 64", 32, 16, 16, 512, 512, 64, dtype="fp32"),
    Case("f32, depth 96", 32, 8, 8, 512, 512, 96, dtype="fp32"),
    Case("f32 causal, depth 128", 4, 16, 16, 1024, 1024, 128, causal=True, dtype="fp32"),
    *_decode("llama-1b", 64, 1024, (1, 8, 32)),
    *_decode("llama-1b", 64, 1024, (1, 32), "half"),
    *_decode("llama-8b", 128, 1024, (1, 8)),
    *_decode("llama-8b", 128, 8192, (1,)),
    *(
        Case(f"llama-1b decode b{b} n1024 at {p}", b, 32, 8, 1, 1024, 64, position=p)
        for b in (1, 8, 32)
        for p in (63, 511, 1023)
    ),
]

# m, n, warps, stages of many rows, by padded depth.
PREFILL = {
    64: [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 1),
        (64, 128, 4, 2),
        (64, 128, 4, 3),
        (128, 32, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
        (128, 128, 8, 3),
    ],
    128: [
        (64, 64, 4, 1),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 1),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 64, 4, 2),
        (128, 64, 8, 1),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 1),
        (128, 128, 8, 2),
    ],
    256: [
        (64, 32, 4, 1),
        (64, 32, 4, 2),
        (64, 64, 4, 1),
        (64, 64, 4, 2),
        (64, 32, 8, 2),
        (64, 64, 8, 2),
        (128, 32, 8, 2),
        (128, 64, 8, 1),
        (128, 64, 8, 2),
    ],
}
SINGLE = [
    (m, n, warps, stages)
    for m, n, warps, stages in itertools.product((32, 64, 128), (16, 32, 64), (4, 8), (1, 2))
    if warps * 8 <= m
]
"""The same in f32."""
# n, warps, stages of few rows.
DECODE = [(32, 2, 3), (64, 2, 3), (64, 4, 3), (64, 4, 4), (128, 4, 2)]


def tiles(case: Case) -> list[dict[str, int]]:
    """The sweep of a case."""
    group = case.h // case.g
    if not case.is_decode:
        names = ("m", "n", "warps", "stages")
        depth = next(d for d in PREFILL if case.d <= d)
        rest = {"pack": 1, "splits": 1}
        shapes = SINGLE if case.dtype == "fp32" else PREFILL[depth]
        found = [dict(zip(names, t)) | rest | {"bounds": 0, "tma": 0} for t in shapes]
        found += [t | {"bounds": 1} for t in found[:5] if case.mask]
        return found if case.dtype == "fp32" else found + [t | {"tma": 1} for t in found]
    fill = max(1, 1 << (132 // (case.b * case.g)).bit_length())
    splits = sorted(
        {
            s
            for s in (1, max(1, fill // 4), max(1, fill // 2), fill, fill * 2)
            if case.n // s >= 32 and (s > 1 or fill <= 2)
        }
    )
    return [
        {"m": 16, "n": n, "warps": w, "stages": s, "pack": group, "splits": p, "bounds": bounds, "tma": 0}
        for (n, w, s), p, bounds in itertools.product(DECODE, splits, (0, 1) if case.mask else (0,))
        if case.n // p >= n
    ]


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
