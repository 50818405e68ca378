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
from lowering import lowered
from torch import nn
from torch_mlir import ir

import topo_opt
from topo_opt import driver, topology
from topo_opt.errors import InputError, TopoError
from topo_opt.frontend.ingest import bytecode, parse
from topo_opt.frontend.weights import pack
from topo_opt.pipeline.run import run
from topo_opt.runtime.weights import Part, Weights
from topo_opt.sharding.split_passes import split_passes
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


def start(folder: Path, world: int, *groups: str) -> list[dict[str, str]]:
    """What every rank says in each scenario of the groups, which are names with commas between them."""
    done = subprocess.run(
        [sys.executable, str(WORKER), str(world), str(folder), *groups],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    outputs = [[(folder / f"said.{g}.{r}").read_text() for g in range(len(groups))] for r in range(world)]
    if done.returncode != 0:
        pytest.fail("\n".join([done.stderr, *(text for texts in outputs for text in texts)]))
    said = [re.split(r"^-- (.+)$", "".join(texts), flags=re.MULTILINE)[1:] for texts in outputs]
    return [dict(zip(texts[::2], texts[1::2], strict=True)) for texts in said]


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
def layer_program() -> torch.export.ExportedProgram:
    torch.manual_seed(0)
    module = Layer().eval().requires_grad_(False)
    return torch.export.export(module, (torch.ones(4, 16),), strict=False)


@pytest.fixture(scope="module")
def layer_module(layer_program: torch.export.ExportedProgram) -> ir.Module:
    return lowered(layer_program)


@pytest.fixture(scope="module")
def layer(layer_program: torch.export.ExportedProgram, tmp_path_factory) -> Path:
    """A folder with a bundle for two ranks, one that is split in another way, and the weights."""
    folder = tmp_path_factory.mktemp("layer")
    program = layer_program
    options = driver.Options("cpu", mesh="model=2", shard=("up.weight=model,_",), tune="off")
    driver.compile({"main": program}, options, folder / "bundle")
    other = driver.Options("cpu", mesh="model=2", shard=("up.weight=_,model", "output.0=_,model"), tune="off")
    driver.compile({"main": program}, other, folder / "other")
    torch.save(dict(program.state_dict), folder / "weights.pt")
    return folder


class Generator(nn.Module):
    """Attention with a cache, between an embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.register_buffer("keys", torch.zeros(2, 4, 8, 4))
        self.register_buffer("values", torch.zeros(2, 4, 8, 4))

    def forward(self, ids, position):
        x = self.embedding(ids)
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = position[:, None] >= torch.arange(8)
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen)
        return self.head(x + self.o(y.transpose(1, 2).flatten(2)))


def prepare_generator(folder: Path, module: nn.Module, programs: dict, patterns: tuple[str, ...], tokens: torch.Tensor, steps) -> Path:  # fmt: skip
    """A bundle for four ranks, batches over one axis and heads over the other, and what the whole model gives."""
    options = driver.Options("cpu", mesh="data=2,model=2", shard=patterns, tune="off")
    driver.compile(programs, options, folder / "bundle")
    calls = []
    with torch.no_grad():
        for first, last in steps:
            arguments = (tokens[:, first:last], torch.arange(first, last) if first == 0 else torch.tensor([first]))  # fmt: skip
            calls.append(("decode" if first else "prefill", arguments, module(*arguments)))
    names = ("cache", "keys", "values")
    state = {n: value for n, value in module.named_buffers() if any(part in n for part in names)}
    torch.save({"calls": calls, "state": state}, folder / "expected.pt")
    return folder


def test_four_ranks_generate_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, tokens = Generator().eval().requires_grad_(False), torch.randint(0, 32, (2, 6))
    programs = {
        name: torch.export.export(module, (tokens[:, :n], torch.arange(n)), strict=False)
        for name, n in (("prefill", 5), ("decode", 1))
    }
    patterns = ("q.weight=model,_", "o.weight=_,model", "keys=data,model,_,_", "ids=data,_")
    prepare_generator(tmp_path, module, programs, patterns, tokens, ((0, 5), (5, 6)))
    found = start(tmp_path, 4, "generate")
    held = [int(re.search(r"holds (\d+) bytes", text["generate"])[1]) for text in found]
    whole = sum(t.numel() * t.element_size() for t in _weights(tmp_path / "bundle"))
    assert max(held) < 0.75 * whole, "products and caches are split, embeddings are not"


@pytest.mark.skipif("TOPO_ALL_MESHES" not in os.environ, reason="takes a minute: TOPO_ALL_MESHES=1")
def test_four_ranks_generate_with_a_model_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, tokens = model_zoo.llama_generator(torch.float32).eval(), torch.randint(3, 101, (2, 9))
    patterns = ("*.q_proj.weight=model,_", "*.up_proj.weight=model,_", "input_ids=data,_")
    programs, calls = module.export(prompt_length=6), []
    options = driver.Options("cpu", mesh="data=2,model=2", shard=patterns, tune="off")
    driver.compile(programs, options, tmp_path / "bundle")
    with torch.no_grad():
        for first, last in ((0, 6), (6, 7), (7, 8), (8, 9)):
            arguments = (tokens[:, first:last], torch.tensor([first]))
            calls.append(("decode" if first else "prefill", arguments, module(*arguments)))
    state = {name: value for name, value in module.named_buffers() if "cache" in name}
    torch.save({"calls": calls, "state": state}, tmp_path / "expected.pt")
    assert all("holds" in text["generate"] for text in start(tmp_path, 4, "generate"))


def _weights(bundle: Path) -> list[torch.Tensor]:
    stored = Weights.open(bundle)
    return [stored[name] for name in stored]


# Scenario -> what the first rank is told about the second one, and by which second; its limit is 3 s, the rest is for busy machines.
# A program is loaded and called in each, by processes in which others have failed before.
SCENARIOS = (
    {
        "wrong-weights": ("rank 1 failed loading the bundle: the weight down.weight is float32[32, 64]", 6),
        "other-bundle": ("rank 1 has another bundle than rank 0: kernels/, plan.json of ... differ", 6),
        "no-bundle": ("rank 1 has not come to load the bundle within 3 s; what it tried last failed: there is no bundle at", 8),
        "never-loads": ("rank 1 has not come to load the bundle within 3 s", 8),
        "load-hangs": ("rank 1 has got nowhere for 3 s; it is reading the weight down.weight", 9),
        "load-killed": ("rank 1 has given no sign of life for 3 s; it was last reading the weight down.weight", 9),
    },
    {
        "load-works": ("did not fail", None),
        "call-errs": ("rank 1 failed in call 2 of main: main can't run on 2 ranks: x is float32[5, 16]", 6),
        "load-out_of_memory": ("rank 1 failed loading the bundle: memory ran out: ", 6),
        "load-stopped": ("rank 1 has given no sign of life for 3 s; it was last reading the weight down.weight", 9),
        "call-elsewhere": ("rank 1 has not come within 3 s; it was last done in call 1 of main", 9),
        "call-stopped": ("rank 1 has given no sign of life for ... it was last done in call 1 of main", 9),
        "call-killed": ("it was last done in call 1 of main (that process was killed", 6),
    },
)  # fmt: skip


def test_a_rank_that_fails_ends_the_others_and_the_next_program_can_be_loaded(layer: Path) -> None:
    first = start(layer, 2, *map(",".join, SCENARIOS))[0]
    for scenario, (sentence, seconds) in {k: v for group in SCENARIOS for k, v in group.items()}.items():
        said = first[scenario]
        assert all(part in said for part in sentence.split(" ... ")), (scenario, said)
        assert seconds is None or float(re.search(r"after ([\d.]+) s", said)[1]) < seconds, said
        assert "Traceback" not in said


def test_a_rank_that_is_missing_is_waited_for_so_long_only(layer: Path, capsys, monkeypatch) -> None:
    for name, value in environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    begin = time.monotonic()
    assert run_tool.main([str(layer / "bundle"), "--timeout", "2"]) == 1
    assert 2 <= time.monotonic() - begin < 30
    said = capsys.readouterr().err
    assert "rank 0 of 2 did not find the others within 2 s: rank 1 did not come" in said
    assert said.count("\n") == 1


def test_torchrun_checks_a_bundle(layer: Path) -> None:
    """One whose ranks return parts of the result."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    found = subprocess.run(
        [*command, "-m", "topo_opt.tools.run", str(layer / "other"), "--check"],
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
        ("model=2", "up.weight=model", "has 1 dimensions, 'up.weight' is of shape \\[64, 16\\]"),
        ("model=2", "right.weight=model,_", "no tensor is named 'right.weight'"),
        ("model=2", "up.weight=data,_", "names the axis 'data'"),
        ("model", "up.weight=model,_", "'model' is no axis of a mesh"),
        (None, "up.weight=model,_", "no mesh was given"),
    ],
)
def test_what_cannot_be_split_is_refused(
    layer_module: ir.Module, mesh: str | None, shard: str, sentence: str
) -> None:
    with pytest.raises(TopoError, match=sentence):
        passes = split_passes("cpu", topology.load("cpu"), mesh, [shard])
        run(f"builtin.module({','.join(passes)})", parse(bytecode(layer_module)))


def test_a_refused_split_leaves_no_bundle(
    layer_program: torch.export.ExportedProgram, tmp_path: Path
) -> None:
    options = driver.Options("cpu", mesh="model=2", shard=("right.weight=model,_",), tune="off")
    with pytest.raises(TopoError, match=r"no tensor is named 'right\.weight'"):
        driver.compile({"main": layer_program}, options, tmp_path / "bundle")
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
