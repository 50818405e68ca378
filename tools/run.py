"""`topo-run`: runs, checks and times a bundle.

Exit codes: 0 all went well, 1 an error that was reported as one line or a check that failed, 2 a command line that does not
parse (an unknown option, a value of another form, options that exclude each other).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from topo_opt.errors import InputError, TopoError
from topo_opt.tools import run_arguments, run_ranks
from topo_opt.tools.reporting import reported

if TYPE_CHECKING:
    from topo_opt.runtime.plan import Plan, Variant
    from topo_opt.runtime.program import Program


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    arguments = _parser().parse_args(argv)
    return run_ranks.end(reported(lambda: _run(arguments), arguments, "topo-run"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topo-run", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="bundle folder made by topo-opt")
    parser.add_argument("--function", metavar="F", help="only this function (default: all)")
    parser.add_argument("--bucket", metavar="DIM=SIZE,...", help="only the variant with these sizes")
    parser.add_argument(
        "--device", default=None, help="cuda, cuda:N or cpu (default: the GPU if there is one)"
    )
    parser.add_argument("--check", action="store_true", help="compare with eager ATen and with float64")
    parser.add_argument("--kernels", action="store_true", help="list the kernels with what they need")
    parser.add_argument("--bench", action="store_true", help="time calls")
    parser.add_argument(
        "--compare", metavar="LIST", default="", help="with --bench: eager,inductor,inductor-max-autotune"
    )
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="with --bench: write the bundle's report with measured beside predicted times, as HTML",
    )
    parser.add_argument(
        "--inputs", metavar="FILE", help="safetensors file with inputs by name (default: made up)"
    )
    parser.add_argument(
        "--weights", metavar="PATH", help="safetensors file or folder, or where the model archive is now"
    )
    parser.add_argument(
        "--random-weights", metavar="SEED", type=int, help="make up weights that the bundle lacks"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of made-up inputs")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="fail on operators that are left to ATen, on calls that run as ATen, and on a GPU on what can't be one CUDA graph",
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=25.0,
        help="bundles for several ranks: seconds that one waits for the others (default: %(default)g)",
    )
    parser.add_argument("--traceback", action="store_true", help="show where in topo-run an error comes from")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    run_arguments.check(arguments)
    if arguments.kernels and not (arguments.check or arguments.bench):
        from topo_opt.runtime.bundle import open_bundle

        _show_kernels(open_bundle(arguments.bundle, verify_weights=False).plan, arguments)
        return 0
    from topo_opt.runtime.bundle import open_bundle

    bundle = open_bundle(arguments.bundle, verify_weights=False)
    if arguments.page is not None:
        from topo_opt.tools.run_page import check_page

        check_page(bundle, arguments.page)
    with run_ranks.connected(bundle.plan, arguments.device, arguments.timeout):
        return _run_program(arguments)


def _run_program(arguments: argparse.Namespace) -> int:
    program = _load(arguments)
    code = _work(program, arguments)
    program.close()
    return code


def _work(program: Program, arguments: argparse.Namespace) -> int:
    if arguments.kernels:
        _show_kernels(program.plan, arguments)
    selected = list(_selected(program.plan, arguments))
    for name, function in program.plan.functions.items():
        if not function.variants and arguments.function in (None, name):
            print(f"{name}: left to ATen as a whole: {function.aten_reason}")
            if arguments.strict:
                raise TopoError(f"{name} is left to ATen as a whole: {function.aten_reason}")
    if arguments.strict:
        _refuse_left_to_aten(selected)
    passed = True
    if arguments.check:
        passed = _check(program, selected, arguments)
    if arguments.bench:
        _bench(program, selected, arguments)
    if not (arguments.check or arguments.bench):
        _call(program, selected, arguments)
    _show_status(program)
    return 0 if passed else 1


def _refuse_left_to_aten(selected: list[tuple[str, Variant]]) -> None:
    from topo_opt.runtime.plan import AtenStep

    for _, variant in selected:
        left = [s for s in variant.steps if isinstance(s, AtenStep)]
        if left:
            ops = Counter(s.op for s in left)
            named = ", ".join(f"{count} x {op}" for op, count in ops.items())
            raise TopoError(
                f"{variant.symbol} has operators that are left to ATen: {named}",
                hint="report.json says why; without --strict they run",
            )


def _load(arguments: argparse.Namespace) -> Program:
    from topo_opt.runtime import load

    return load(
        arguments.bundle,
        arguments.device,
        weights=arguments.weights,
        random_weights=arguments.random_weights,
        strict=arguments.strict,
        graphs="require" if arguments.strict else "auto",
        timeout_s=arguments.timeout,
    )


def _selected(plan: Plan, arguments: argparse.Namespace) -> list[tuple[str, Variant]]:
    """Variants that --function and --bucket name; an error that lists what there is when they name nothing."""
    bucket = run_arguments.bucket_of(arguments.bucket)
    if arguments.function is not None and arguments.function not in plan.functions:
        raise InputError(
            f"there is no function {arguments.function!r}", hint="there is " + ", ".join(plan.functions)
        )
    found = [
        (name, v)
        for name, f in plan.functions.items()
        if arguments.function in (None, name)
        for v in f.variants
        if all(v.bucket.get(k) == size for k, size in bucket.items())
    ]
    if not found and bucket:
        have = sorted(
            {
                ", ".join(f"{k}={s}" for k, s in v.bucket.items())
                for f in plan.functions.values()
                for v in f.variants
            }
        )
        raise InputError(
            f"no variant has {arguments.bucket}",
            hint="there is " + "; ".join(h or "(one size)" for h in have),
        )
    return found


def _given(arguments: argparse.Namespace, selected: list[tuple[str, Variant]]) -> dict[str, Any]:
    """The tensors of --inputs by name; an error where they are not just those that the selected variants take."""
    if arguments.inputs is None:
        return {}
    import safetensors
    import safetensors.torch

    try:
        found = safetensors.torch.load_file(arguments.inputs)
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{arguments.inputs} can't be read as a safetensors file: {error}") from None
    wanted = {leaf.name: None for _, v in selected for leaf in v.inputs if leaf.kind == "tensor"}
    for fault, names in (("has no", wanted.keys() - found.keys()), ("has", found.keys() - wanted.keys())):
        if names:
            which = ", ".join(repr(n) for n in sorted(names))
            takes = ", ".join(wanted) or "none"
            raise InputError(f"{arguments.inputs} {fault} {which}", hint=f"the inputs are: {takes}")
    return found


def _show_kernels(plan: Plan, arguments: argparse.Namespace) -> None:
    from topo_opt.runtime.plan import KernelStep
    from topo_opt.tools.run_tables import show

    selected = _selected(plan, arguments)
    launches = Counter(s.kernel for _, v in selected for s in v.steps if isinstance(s, KernelStep))
    rows = []
    for name, k in sorted(plan.kernels.items(), key=lambda item: (item[1].family, item[0])):
        if launches[name]:
            r = k.resources
            grid = "x".join(map(str, k.grid))
            used = (r.registers, r.spills, r.shared) if r else (None, None, None)
            rows.append(
                [
                    k.family,
                    name,
                    launches[name],
                    grid,
                    k.num_warps,
                    k.num_stages,
                    *used,
                    "yes" if k.pdl else "no",
                ]
            )
    columns = (
        "family",
        "kernel",
        "launches",
        "grid",
        "warps",
        "stages",
        "registers",
        "spills",
        "shared",
        "pdl",
    )
    show(f"{len(rows)} kernels, {sum(launches.values())} launches", columns, rows)
    names = {v.symbol for _, v in selected}
    copies = [c for c in plan.meta.get("copies") or [] if isinstance(c, dict) and c.get("function") in names]
    if copies:
        told = ("function", "kernel", "tensor", "reason")
        show(
            "copied because it can't be rewritten in place",
            told,
            [[str(c.get(f)) for f in told] for c in copies],
        )
    memory = [[v.symbol, _bucket(v), v.arena_bytes, v.naive_bytes, v.zeroed_bytes] for _, v in selected]
    fields = ("variant", "bucket", "arena", "without reuse", "kept zero")
    show("memory for temporaries, bytes", fields, memory)


def _check(program: Program, selected: list[tuple[str, Variant]], arguments: argparse.Namespace) -> bool:
    from topo_opt.tools.run_check import check_variant
    from topo_opt.tools.run_tables import show

    passed, given = True, _given(arguments, selected)
    for function, variant in selected:
        result = check_variant(program, function, variant, seed=arguments.seed, given=given)
        rows = [
            [
                v.name,
                v.max_error,
                v.eager_max_error,
                v.rms_error,
                v.eager_rms_error,
                "ok" if v.passed else v.reason,
            ]
            for v in result.verdicts
        ]
        columns = ("result", "max error", "eager's", "rms error", "eager's", "verdict")
        show(f"{variant.symbol}: error against float64", columns, rows)
        if result.fallback:
            print(f"{variant.symbol}: not checked, it ran as eager ATen: {result.fallback}")
        passed &= result.passed
    print("check passed" if passed else "check FAILED")
    return passed


def _bench(program: Program, selected: list[tuple[str, Variant]], arguments: argparse.Namespace) -> None:
    from topo_opt.tools.run_bench import COLUMNS, bench_variant
    from topo_opt.tools.run_tables import show

    peers, given = run_arguments.peers_of(arguments.compare), _given(arguments, selected)
    measured = []
    for function, variant in selected:
        b = bench_variant(program, function, variant, compare=peers, seed=arguments.seed, given=given)
        floor = f", floor {b.floor_ms:.4g} ms" if b.floor_ms is not None else ""
        title = f"{variant.symbol} ({_bucket(variant)}): {b.kernels} launches, {b.nbytes / 1e6:.4g} MB{floor}"
        show(title, COLUMNS, b.rows())
        measured.append((function, variant, b))
    if arguments.page is not None:
        from topo_opt.tools.run_page import write_page

        write_page(program, measured, arguments.page)


def _call(program: Program, selected: list[tuple[str, Variant]], arguments: argparse.Namespace) -> None:
    import torch

    from topo_opt.runtime.sample_inputs import sample_leaves

    given = _given(arguments, selected)
    for function, variant in selected:
        inputs = program.whole_inputs(variant).inputs
        leaves = sample_leaves(inputs, program.device, arguments.seed, given)
        for i, out in enumerate(program.call_flat(function, leaves)):
            if isinstance(out, torch.Tensor):
                number = (
                    out.double().abs().mean().item() if out.numel() and not out.is_complex() else float("nan")
                )
                kind = str(out.dtype).removeprefix("torch.")
                print(f"{variant.symbol}: output {i}: {kind}{list(out.shape)}, mean magnitude {number:.4g}")
            else:
                print(f"{variant.symbol}: output {i}: {out!r}")


def _show_status(program: Program) -> None:
    """What did not take effect: nothing is silent."""
    for reason, count in program.fallbacks.items():
        print(f"{count} calls ran as eager ATen: {reason}")
    if program.device.type == "cuda":
        for status in program.status():
            if status.bound and not status.graph:
                print(f"{status.symbol}: not one CUDA graph: {status.reason}")
    if program.memory.random_names:
        print(f"{len(program.memory.random_names)} weights are random (seed {program.memory.random_seed})")


def _bucket(variant: Variant) -> str:
    return ", ".join(f"{k}={v}" for k, v in variant.bucket.items()) or "one size"


if __name__ == "__main__":
    sys.exit(main())
