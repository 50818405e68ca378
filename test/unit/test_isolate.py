"""A child's values, errors, crashes and limits arrive in the parent as documented."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from topo_opt.errors import CompilerCrash, Remark, TopoError, UnsupportedError, UntrustedError
from topo_opt.frontend import wire
from topo_opt.frontend.isolate import Limits, run_isolated

VALUES = [
    None,
    True,
    -(2**70),
    1.5,
    float("inf"),
    "text \ud800 \n",
    b"\x00\xff",
    [1, [2.0, b"a", b""]],
    (1, ("x",)),
    {"a": (1, 2), 3: {"tuple": [1]}, ("k", 1): b"z" * 100},
    [Remark("left-to-aten", "aten.sort", "no kernel", "m.py:3")],
]


@pytest.fixture(autouse=True)
def crash_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPO_OPT_CRASH_DIR", str(tmp_path / "crash"))
    return tmp_path / "crash"


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_wire_round_trip(value):
    back = wire.loads(wire.dumps(value))
    assert back == value and type(back) is type(value)


def test_wire_keeps_nan_and_refuses_the_rest():
    assert str(wire.loads(wire.dumps([float("nan")]))) == "[nan]"
    with pytest.raises(TypeError, match=r"result\[0\]\['a'\] is a builtins.set"):
        wire.dumps([{"a": {1}}])


@pytest.mark.parametrize("cut", [0, 4, 12, 20, -1])
def test_wire_truncated(cut):
    with pytest.raises(TopoError):
        wire.loads(wire.dumps({"a": b"0123456789"})[:cut])


def test_large_result_does_not_block():
    blob = run_isolated(lambda n: [b"x" * n, "y" * n], 3 << 20, stage="t")
    assert [len(part) for part in blob] == [3 << 20, 3 << 20]


def test_error_class_and_fields_survive(capfd):
    def fail():
        print("said on stdout")
        os.write(2, b"said by C++\n")
        raise UntrustedError("entry x", hint="do y", where="f.py:1")

    with pytest.raises(UntrustedError) as info:
        run_isolated(fail, stage="t")
    assert info.value.render() == "f.py:1: error: entry x (do y)"
    assert "said on stdout" in info.value.captured_output and "said by C++" in info.value.captured_output
    assert capfd.readouterr() == ("", "")


def test_error_subclass_of_another_module():
    class LocalError(UnsupportedError):
        pass

    def fail():
        error = LocalError("m")
        error.op = "aten.sort"
        raise error

    with pytest.raises(LocalError) as info:
        run_isolated(fail, stage="t")
    assert info.value.op == "aten.sort"


def test_exception_becomes_a_crash_with_a_reproducer():
    def write(folder):
        (folder / "input.mlir").write_text("module {}")

    def boom():
        raise KeyError("nothing")

    with pytest.raises(CompilerCrash, match="the lower stage failed: KeyError: 'nothing'") as info:
        run_isolated(boom, stage="lower", reproducer=write)
    folder = info.value.hint.removeprefix("to report it, send ")
    assert sorted(os.listdir(folder)) == ["input.mlir", "report.txt"]
    assert "in boom" in Path(folder, "report.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL], ids=lambda n: n.name)
def test_signal_becomes_a_crash(number, crash_dir):
    with pytest.raises(CompilerCrash, match=f"the import stage died with {number.name}") as info:
        run_isolated(lambda: os.kill(os.getpid(), number), stage="import")
    assert str(crash_dir) in info.value.hint
    if number != signal.SIGKILL:
        assert "Fatal Python error" in info.value.captured_output


def test_exit_without_result():
    with pytest.raises(CompilerCrash, match="ended with status 7 and no result"):
        run_isolated(lambda: os._exit(7), stage="t")


def test_result_that_cannot_travel():
    with pytest.raises(CompilerCrash, match=r"TypeError: result\['value'\] is a builtins.object"):
        run_isolated(object, stage="t")


def test_memory_limit():
    with pytest.raises(CompilerCrash, match="MemoryError"):
        run_isolated(lambda: len(bytearray(1 << 30)), stage="t", limits=Limits(memory_bytes=256 << 20))


def test_cpu_limit():
    def spin():
        while True:
            pass

    with pytest.raises(CompilerCrash, match=r"SIGXCPU.*CPU time limit of 1 s"):
        run_isolated(spin, stage="t", limits=Limits(cpu_seconds=1))


def test_wall_limit_kills_the_child():
    start = time.monotonic()
    with pytest.raises(CompilerCrash, match=r"did not finish within 0\.3 s"):
        run_isolated(time.sleep, 60, stage="t", limits=Limits(wall_seconds=0.3))
    assert time.monotonic() - start < 5


def test_torch_in_the_child_after_threads_in_the_parent():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(2)
    try:
        (torch.randn(256, 256) @ torch.randn(256, 256)).sum()
        got = run_isolated(
            lambda: float((torch.ones(256, 256) @ torch.ones(256, 256)).sum()),
            stage="t",
            limits=Limits(wall_seconds=60),
        )
    finally:
        torch.set_num_threads(1)
    assert got == 256.0**3


def test_interrupt_kills_the_child(tmp_path):
    """Ctrl-C of the parent ends the child, which ignores it."""
    program = f"""
import os, time
from topo_opt.frontend.isolate import run_isolated
def work():
    open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
    time.sleep(60)
try:
    run_isolated(work, stage="t")
except KeyboardInterrupt:
    raise SystemExit(42)
"""
    # What runs in the background of a shell without job control ignores interrupts, and so does what it starts.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    parent = subprocess.Popen([sys.executable, "-c", program], preexec_fn=heard)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.send_signal(signal.SIGINT)
    assert parent.wait(10) == 42
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_descriptors_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run_isolated(int, stage="t")
        with pytest.raises(CompilerCrash):
            run_isolated(lambda: os._exit(1), stage="t")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_child_sees_no_gpu(monkeypatch):
    """CUDA can't start again after a fork, so that asking it would fail in a process that uses a GPU."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    seen = run_isolated(lambda: [torch.cuda.is_available(), torch.cuda.device_count()], stage="import")
    assert seen == [False, 0]
