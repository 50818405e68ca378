"""codegen.triton.arrivals: programs that come together on one result, by counting themselves or by waiting for parts."""

import importlib.util
import math
import re
import threading
import time

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from topo_opt.codegen.triton.arrivals import Meeting, Part
from topo_opt.codegen.triton.writer import Writer
from topo_opt.errors import UnsupportedError
from topo_opt.runtime.interpreter import interpreting, launch
from topo_opt.runtime.kernel_module import load_function

N = 4
ALL_ONES = torch.tensor([-1], dtype=torch.int32).view(torch.float32)


def source(meeting, program, *, twice=False):
    """Program p brings `values + p`; who combines stores the parts side by side."""
    writer = Writer(indent=1)
    writer.line(f"program = {program}")
    writer.line(f"lane = tl.arange(0, {N})")
    writer.line("mine = tl.load(values + lane) + program")
    meeting.give(writer, [Part("mine", f"part + program * {N} + lane")])
    with writer.block(meeting.header(writer, "0", "program")):
        for again in (True, False) if twice else (False,):
            parts = [Part(f"all{p}", f"part + {p * N} + lane", again=again) for p in range(meeting.programs)]
            meeting.take(writer, parts)
            for p, part in enumerate(parts):
                writer.line(f"tl.store(out + {p * N} + lane, {part.name})")
        meeting.end(writer, "0")
    head = (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(values, out, part, arrivals):\n"
    )
    return head + writer.text()


def memory(meeting):
    made = {"part": meeting.scratch("fp32", meeting.programs * N)} | meeting.counters(1)
    dtypes = {"fp32": torch.float32, "i32": torch.int32}
    return {
        name: torch.zeros(s.numel, dtype=dtypes[s.dtype])
        if s.zeroed
        else torch.full((s.numel,), math.nan, dtype=dtypes[s.dtype])
        for name, s in made.items()
    }


def run(text, grid, values, out, scratch):
    with interpreting():
        function = load_function(text, "k.py", "k")
        given = {"arrivals": torch.zeros(1, dtype=torch.int32), **scratch}
        launch(
            function, (grid, 1, 1), {"values": values, "out": out, **given}, [values, out, *given.values()]
        )


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("programs", [1, 2, 5])
@pytest.mark.parametrize("twice", [False, True])
def test_parts_are_combined_once_and_leave_no_trace(waits, programs, twice):
    meeting, values = Meeting(programs, waits, warps=4), torch.tensor([0.0, -1.5, -math.inf, 3e38])
    scratch, out = memory(meeting), torch.empty(programs * N)
    for _ in range(2):
        out.fill_(math.nan)
        run(source(meeting, "tl.program_id(0)", twice=twice), programs, values, out, scratch)
        assert torch.equal(out.view(programs, N), values + torch.arange(programs)[:, None])
    assert not scratch["part" if waits else "arrivals"].any()


def test_the_last_program_waits_for_parts_that_come_later():
    meeting, values = Meeting(2, True, warps=4), torch.zeros(N)
    scratch, out, late = memory(meeting), torch.full((2 * N,), math.nan), torch.arange(1.0, N + 1)

    def bring():
        for i in (2, 0, 3, 1):
            time.sleep(0.05)
            scratch["part"][i] = ~late.view(torch.int32)[i]

    thread = threading.Thread(target=bring)
    thread.start()
    run(source(meeting, "1"), 1, values, out, scratch)
    thread.join()
    assert torch.equal(out, torch.cat([late, values + 1])) and not scratch["part"].any()


def test_a_number_whose_bits_would_say_nothing_has_come_arrives_as_not_a_number():
    meeting, values = Meeting(2, True, warps=4), ALL_ONES.repeat(N)
    scratch, out = memory(meeting), torch.zeros(2 * N)
    run(source(meeting, "tl.program_id(0)").replace(" + program\n", "\n"), 2, values, out, scratch)
    assert out.isnan().all() and not scratch["part"].any()


def test_only_floats_are_waited_for():
    with pytest.raises(UnsupportedError, match="type i64"):
        Meeting(2, True, warps=4).scratch("i64", 8)
    assert not Meeting(2, False, warps=4).scratch("i64", 8).zeroed


def test_all_threads_go_on_together(tmp_path):
    """Every warp reads four elements for itself, and each may see something else: what the loop ends by passes through shared memory."""
    file = tmp_path / "kernel.py"
    file.write_text(source(Meeting(2, True, warps=4), "tl.program_id(0)"))
    spec = importlib.util.spec_from_file_location("arrivals_compiled", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = {"values": "*fp32", "out": "*fp32", "part": "*i32", "arrivals": "*i32"}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    made = triton.compile(ASTSource(module.k, kinds, {}), target=GPUTarget("cuda", 90, 32), options=options)
    (loop,) = re.findall(r"\n(\$L__BB0_\d+):.*?Loop Header(.*?)bra.uni\s+\1;", made.asm["ptx"], re.S)
    before, reads = loop[1].split("ld.volatile", 1)
    assert "st.shared" in before and "bar.sync" in before and "ld.shared" in before.split("bar.sync")[-1]
    assert reads.count("ld.volatile") == 1
