"""Worker of `codegen.resources`: reads a kernel a line as JSON from stdin, writes a line for each to stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from topo_opt.codegen.resources import parse_usage
from topo_opt.runtime.kernel_module import load_module


def main() -> None:
    """Compiles kernels until there are no more; one that fails gives a line with "error"."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = compile_kernel(job["kernel"], job["capability"])
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {text[-1][:400]}"}
        print(json.dumps(answer), file=answers, flush=True)


def compile_kernel(kernel: dict[str, Any], capability: int) -> dict[str, Any]:
    """Compiles one kernel to machine code; its resource use as the fields of `runtime.plan.Resources`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = load_module(kernel["source"], f"{kernel['name']}.py")[kernel["name"]]
    pointers = [i for i, n in enumerate(function.arg_names) if kernel["signature"].get(n, "").startswith("*")]
    signature = {n: kernel["signature"].get(n, "constexpr") for n in function.arg_names}
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(function.arg_names.index(n),): v for n, v in kernel["constexprs"].items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel["options"])
    registers, stack, _ = _usage(compiled.asm["cubin"])
    return {
        "target": f"sm_{capability}",
        "registers": registers,
        "spills": stack,
        "shared": int(compiled.metadata.shared),
    }


def _usage(cubin: bytes) -> tuple[int, int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin)
    try:
        done = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        os.unlink(file.name)
    usage = parse_usage(done.stdout)
    if usage is None:
        raise RuntimeError(f"cuobjdump gave no resource usage: {(done.stdout + done.stderr)[-200:]}")
    return usage


if __name__ == "__main__":
    main()
