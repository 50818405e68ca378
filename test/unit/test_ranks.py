"""Bundles for several ranks in as many processes, connected by gloo; kernels run in Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import model_zoo
import pytest
import torch
from torch import nn

import topo_opt
from topo_opt import driver
from topo_opt.errors import InputError, TopoError
from topo_opt.frontend.weights import pack
from topo_opt.runtime.weights import Part, Weights
from topo_opt.tools import run as run_tool

WORKER = Path(__file__).with_name("rank_worker.py")


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun sets for a process."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(scenario: str, folder: Path, world: int) -> list[tuple[int, str]]:
    """Exit code and output of every rank."""
    port = free_port()
    command = [sys.executable, str(WORKER), scenario, str(folder)]
    ranks = [
        subprocess.Popen(
            command,
            env=environment(r, world, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(world)
    ]
    try:
        outputs = [r.communicate(timeout=240)[0] for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    return [(r.returncode, text) for r, text in zip(ranks, outputs, strict=True)]


class Layer(nn.Module):
    """Two products and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("seen", torch.zeros(4, 16))

    def forward(self, x):
        y = self.down(torch.nn.functional.gelu(self.up(x)))
        self.seen.add_(y)
        return torch.softmax(y + x, -1)


@pytest.fixture(scope="module")
def layer(tmp_path_factory) -> Path:
    """A folder with a bundle for two ranks, and its weights."""
    folder = tmp_path_factory.mktemp("layer")
    torch.manual_seed(0)
    module = Layer().eval().requires_grad_(False)
    program = torch.export.export(module, (torch.ones(4, 16),), strict=False)
    options = driver.Options("cpu", mesh="model=2", shard=("up.weight=model,_",), tune="off")
    driver.compile({"main": program}, options, folder / "bundle")
    torch.save(dict(module.state_dict()), folder / "weights.pt")
    return folder


@pytest.fixture(scope="module")
def generator(tmp_path_factory) -> Path:
    """A folder with a Llama for four ranks, batches over one axis and heads over the other, and what the whole model gives."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    module = model_zoo.llama_generator(torch.float32).eval()
    programs = module.export(prompt_length=6)
    patterns = ("*.q_proj.weight=model,_", "*.up_proj.weight=model,_", "input_ids=data,_")
    options = driver.Options("cpu", mesh="data=2,model=2", shard=patterns, tune="off")
    driver.compile(programs, options, folder / "bundle")
    tokens, calls = torch.randint(3, 101, (2, 9)), []
    with torch.no_grad():
        for first, last in ((0, 6), (6, 7), (7, 8), (8, 9)):
            arguments = (tokens[:, first:last], torch.tensor([first]))
            calls.append(("decode" if first else "prefill", arguments, module(*arguments)))
    state = {name: value for name, value in module.named_buffers() if "cache" in name}
    torch.save({"calls": calls, "state": state}, folder / "expected.pt")
    return folder


def test_four_ranks_generate_as_one_does(generator: Path) -> None:
    found = start("generate", generator, 4)
    assert [code for code, _ in found] == [0] * 4, found
    held = [int(re.search(r"holds (\d+) bytes", text)[1]) for _, text in found]
    whole = sum(t.numel() * t.element_size() for t in _weights(generator / "bundle"))
    assert max(held) < 0.75 * whole, "products and caches are split, embeddings are not"


def _weights(bundle: Path) -> list[torch.Tensor]:
    stored = Weights.open(bundle)
    return [stored[name] for name in stored]


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("dies", "another rank failed, is missing or came too late"),
        ("errs", "another rank failed, is missing or came too late"),
        ("wrong-weights", "rank 1 failed loading the bundle: the weight down.weight is float32[32, 64]"),
    ],
)
def test_one_rank_that_fails_ends_the_others(layer: Path, scenario: str, sentence: str) -> None:
    first, second = start(scenario, layer, 2)
    assert first[0] == 1 and second[0] in (1, 3), (first, second)
    assert sentence in first[1]
    assert float(re.search(r"after ([\d.]+) s", first[1])[1]) < 30


def test_a_rank_that_is_missing_is_waited_for_so_long_only(layer: Path) -> None:
    begin = time.monotonic()
    found = subprocess.run(
        [sys.executable, "-m", "topo_opt.tools.run", str(layer / "bundle"), "--timeout", "3"],
        env=environment(0, 2, free_port()), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 1 and time.monotonic() - begin < 60
    assert "rank 0 of 2 did not find the others within 3 s" in found.stderr
    assert "Traceback" not in found.stderr


def test_torchrun_checks_a_bundle(layer: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    found = subprocess.run(
        [*command, "-m", "topo_opt.tools.run", str(layer / "bundle"), "--check"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("check passed") == 1, "the first rank alone speaks"


def test_one_process_is_told_how_to_start(layer: Path, capsys, monkeypatch) -> None:
    with pytest.raises(InputError, match="for 2 ranks, and no process group was initialised"):
        topo_opt.load(layer / "bundle", "cpu")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run_tool.main([str(layer / "bundle")]) == 1
    assert "torchrun --nproc-per-node=2" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert run_tool.main([str(layer / "bundle")]) == 1
    assert "for 2 ranks, WORLD_SIZE is 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "shard", "sentence"),
    [
        ("model=3", "up.weight=model,_", "64, 16] does not divide into 3 parts"),
        ("model=2", "up.weight=model", "has 1 dimensions, 'up.weight' is of shape \\[64, 16\\]"),
        ("model=2", "right.weight=model,_", "no tensor is named 'right.weight'"),
        ("model=2", "up.weight=data,_", "names the axis 'data'"),
        ("model", "up.weight=model,_", "'model' is no axis of a mesh"),
        (None, "up.weight=model,_", "no mesh was given"),
    ],
)
def test_what_cannot_be_split_is_refused(tmp_path: Path, mesh: str | None, shard: str, sentence: str) -> None:
    program = torch.export.export(Layer().eval(), (torch.ones(4, 16),), strict=False)
    options = driver.Options("cpu", mesh=mesh, shard=(shard,), tune="off")
    with pytest.raises(TopoError, match=sentence):
        driver.compile({"main": program}, options, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def _resident(path: Path) -> int:
    """Bytes of a file that are mapped into this process and in memory, by /proc/self/smaps."""
    found, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc")
def test_a_rank_reads_its_part_of_the_weights(tmp_path: Path) -> None:
    """A sixteenth of 32 MB, and what the kernel maps around it; of either kind of file."""
    tensor = torch.arange(8 << 20, dtype=torch.float32).reshape(4096, 2048)
    source = pack({"w": tensor})
    source.writer(tmp_path / "weights.safetensors")
    (tmp_path / "weights.json").write_text(json.dumps(source.table))
    part = Part(((1024, 256), (0, 2048)), (4096, 2048))
    for weights in (Weights.open(tmp_path), Weights.open(tmp_path, source=tmp_path / "weights.safetensors")):
        before = _resident(tmp_path / "weights.safetensors")
        found = weights.fetch("w", part)
        assert torch.equal(found.clone(), tensor[1024:1280])
        read = _resident(tmp_path / "weights.safetensors") - before
        assert read <= 8 << 20, f"{read} bytes were read for {found.numel() * 4}"
