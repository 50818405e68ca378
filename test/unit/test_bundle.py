"""codegen.bundle writes a bundle whole or not at all; runtime.bundle takes nothing on trust."""

import errno
import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import plan_samples as samples
import pytest

from topo_opt.codegen import bundle as writer
from topo_opt.codegen.bundle import write_bundle
from topo_opt.errors import InputError, TopoError, UntrustedError
from topo_opt.runtime import kernel_scan, load
from topo_opt.runtime.bundle import open_bundle, verify_weight_files

ROWS = {"symbol": "s0", "min": 1, "max": None}
ATEN = {
    "decode": {
        "inputs": [
            {"name": "bias", "kind": "param", "target": "bias", "shape": [1, 8], "dtype": "float32"},
            {"name": "cache", "kind": "buffer", "target": "cache", "shape": [4, 8], "dtype": "float32"},
            {"name": "x", "kind": "input", "target": "x", "shape": [None, 8], "dtype": "float32", "dims": [ROWS, None]},
            {"name": "pos", "kind": "input", "target": "pos", "shape": [None], "dtype": "int64", "dims": [ROWS]},
        ],
        "nodes": [
            {"name": "y", "op": "aten.add.Tensor", "args": [{"ref": "x"}, {"ref": "bias"}], "kwargs": {}},
            {"name": "n", "op": "aten.index_copy.default", "args": [{"ref": "cache"}, 0, {"ref": "pos"}, {"ref": "y"}], "kwargs": {}},
            {"name": "o", "op": "aten.add.Tensor", "args": [{"ref": "n"}, 1.0], "kwargs": {}},
            {"name": "s", "op": "aten.sum.default", "args": [{"ref": "o"}], "kwargs": {}},
        ],
        "outputs": [
            {"kind": "mutation", "target": "cache", "value": {"ref": "n"}},
            {"kind": "output", "target": "0", "value": {"ref": "o"}},
            {"kind": "output", "target": "1", "value": {"ref": "s"}},
        ],
    }
}  # fmt: skip
SOURCES = {k: v.source for k, v in samples.CACHE_KERNELS.items()}


def write(path, **options):
    built = samples.build(samples.CACHE_IR, samples.CACHE_KERNELS)
    return write_bundle(path, built, SOURCES, aten=ATEN, ir={"kernel": samples.CACHE_IR}, **options)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write(tmp_path_factory.mktemp("good") / "bundle")


@pytest.fixture
def copy(good, tmp_path):
    return Path(shutil.copytree(good, tmp_path / "bundle"))


def listing(folder):
    return sorted(p.name for p in folder.iterdir())


def reseal(bundle, name):
    """Makes the manifest agree with a changed file."""
    data = (bundle / name).read_bytes()
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_same_input_gives_the_same_bytes(good, tmp_path):
    again = write(tmp_path / "again")
    names = sorted(p.relative_to(good) for p in good.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(again) for p in again.rglob("*") if p.is_file())
    assert all((good / n).read_bytes() == (again / n).read_bytes() for n in names)


def test_an_older_bundle_is_replaced_and_a_stranger_is_left_alone(tmp_path):
    out = write(tmp_path / "b")
    (out / "kernels" / "stale.py").write_text("")
    write(out)
    assert open_bundle(out) and listing(tmp_path) == ["b"]
    stranger = tmp_path / "mine"
    stranger.mkdir()
    (stranger / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is not a bundle, it is left alone"):
        write(stranger)
    assert (stranger / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_nothing_and_keeps_the_old(tmp_path, monkeypatch, failure):
    out = write(tmp_path / "b")
    before = (out / "manifest.json").read_bytes()

    def fail(path):
        raise failure

    monkeypatch.setattr(writer, "_sha256", fail)
    for target in (out, tmp_path / "fresh"):
        with pytest.raises((InputError, KeyboardInterrupt)) as caught:
            write(target)
        if caught.type is InputError:
            assert "the disk is full" in caught.value.message
    assert listing(tmp_path) == ["b"] and (out / "manifest.json").read_bytes() == before


def test_an_unwritable_place_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        write(tmp_path / "file" / "b")


def test_missing_and_foreign_folders(tmp_path):
    with pytest.raises(InputError, match="there is no bundle at"):
        open_bundle(tmp_path / "none")
    with pytest.raises(InputError, match=r"it has no manifest\.json"):
        open_bundle(tmp_path)
    (tmp_path / "f").write_text("")
    with pytest.raises(InputError, match="is not a bundle folder"):
        open_bundle(tmp_path / "f")


def test_a_changed_byte_is_found(copy):
    path = copy / "kernels" / "k_add.py"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    with pytest.raises(UntrustedError, match=r"kernels/k_add\.py is not the file .* sha256 differs"):
        open_bundle(copy)


def test_a_weight_file_that_is_gone_or_another_is_named_with_what_to_do(tmp_path):
    def write_weights(path):
        path.write_bytes(b"w" * 100)

    built = samples.build(samples.CACHE_IR, samples.CACHE_KERNELS)
    folder = write_bundle(tmp_path / "b", built, SOURCES, aten=ATEN, weights_writer=write_weights)
    file, repair = (
        folder / "weights.safetensors",
        "copy the bundle again as a whole folder, or compile the model again",
    )
    file.write_bytes(b"v" * 100)
    verified = open_bundle(folder, verify_weights=False)
    for check in (lambda: open_bundle(folder), lambda: verify_weight_files(verified)):
        with pytest.raises(
            UntrustedError, match=rf"{file} is not the file .* differs, \w{{12}}\.\.\. instead of \w{{12}}"
        ) as info:
            check()
        assert repair in info.value.hint
    file.write_bytes(b"w" * 99)
    with pytest.raises(UntrustedError, match=rf"{file} has 99 bytes, the manifest says 100 .*{repair}"):
        open_bundle(folder, verify_weights=False)
    file.unlink()
    with pytest.raises(
        UntrustedError,
        match=rf"the bundle {folder} lacks weights.safetensors, .* 100 bytes .*moved.*{repair}",
    ):
        open_bundle(folder, verify_weights=False)


def test_links_extra_files_and_paths_that_leave_are_refused(copy, tmp_path):
    (copy / "extra.txt").write_text("")
    with pytest.raises(UntrustedError, match=r"extra\.txt', which its manifest doesn't list"):
        open_bundle(copy)
    (copy / "extra.txt").unlink()
    outside = tmp_path / "outside.py"
    outside.write_bytes((copy / "kernels" / "k_add.py").read_bytes())
    (copy / "kernels" / "k_add.py").unlink()
    (copy / "kernels" / "k_add.py").symlink_to(outside)
    with pytest.raises(UntrustedError, match="is a link"):
        open_bundle(copy)
    (copy / "kernels" / "k_add.py").unlink()
    for name in ("../outside.py", "/etc/passwd", "kernels/../../outside.py"):
        manifest = json.loads((copy / "manifest.json").read_bytes())
        manifest["files"][name] = manifest["files"]["plan.json"]
        (copy / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UntrustedError, match="has no place in a bundle"):
            open_bundle(copy)


def test_a_link_to_a_bundle_is_refused(good, tmp_path):
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(InputError, match="is not a bundle folder"):
        open_bundle(tmp_path / "link")


def test_another_schema_says_what_to_do(copy):
    manifest = json.loads((copy / "manifest.json").read_bytes())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"schema": 7}))
    with pytest.raises(UntrustedError, match="schema 7, this version reads schema 1") as caught:
        open_bundle(copy)
    assert "compile the model again" in caught.value.hint


HEAD = '"""k"""\n\nimport triton\nimport triton.language as tl\n'
JIT = "@triton.jit\ndef k(x, B: tl.constexpr):\n    "
EVIL = [
    ("import os\n", "import os"),
    (HEAD + "open('f', 'w')\n", "an expression"),
    (HEAD + "x = open\n", "this assignment"),
    (HEAD + "x: open('f', 'w') = 1\n", "this assignment"),
    (HEAD + "def k(x):\n    pass\n", "without @triton.jit"),
    (HEAD + "@open\ndef k(x):\n    pass\n", "without @triton.jit"),
    (HEAD + "class A:\n    pass\n", "ClassDef"),
    (HEAD + JIT + "open('f')\n", "the name open"),
    (HEAD + JIT + "eval('1')\n", "the name eval"),
    (HEAD + JIT + "import os\n", "Import"),
    (HEAD + JIT + "x.__class__\n", "the attribute __class__"),
    (HEAD + JIT + "tl.core.os\n", r"tl\.core\.os"),
    (HEAD + JIT + "triton.runtime\n", r"triton\.runtime"),
    (HEAD + JIT + "x.handle\n", "handle"),
    (HEAD + JIT + "tl.load(x).handle.data\n", "the attribute"),
    (HEAD + JIT + "tl = 1\n", "a new meaning of tl"),
    (HEAD + JIT + "(lambda: 1)()\n", "Lambda"),
    (HEAD + "@triton.jit\ndef k(x=open('f')):\n    pass\n", "a default"),
    (HEAD + "@triton.jit\ndef k(x: open('f')):\n    pass\n", "an annotation"),
    ("def", "is not a Python file"),
    ("\0", "is not a Python file"),
]


@pytest.mark.parametrize(("source", "reason"), EVIL, ids=[str(i) for i in range(len(EVIL))])
def test_a_kernel_file_can_only_hold_kernels(source, reason):
    with pytest.raises(UntrustedError, match=reason):
        kernel_scan.check(source.encode(), "kernels/k.py")


def test_kernel_files_of_the_samples_pass_the_scan():
    for name, source in SOURCES.items():
        assert kernel_scan.check(source.encode(), name) == source


# --- fuzz: mutated bundles give TopoErrors or load, never anything else ---


def mutate_value(value, generator):
    """A copy of a JSON value with one thing changed somewhere."""
    if isinstance(value, dict) and value and generator.random() < 0.93:
        key = generator.choice(sorted(value))
        if generator.random() < 0.08:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: mutate_value(value[key], generator)}
    if isinstance(value, list) and value and generator.random() < 0.93:
        i = generator.randrange(len(value))
        if generator.random() < 0.1:
            return value[:i] + value[i + 1 :]
        return [*value[:i], mutate_value(value[i], generator), *value[i + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and generator.random() < 0.6:
        return value + generator.choice([-1, 1, 2**40, -(2**40), 255, 10**30])
    if isinstance(value, str) and generator.random() < 0.6:
        return generator.choice(
            [value + "x", "../" + value, "", value[:-1], "\0", "temp", "float64", "é" * 100, "__import__"]
        )
    return generator.choice([None, -1, 0, 1.5, True, "x", [], {}, [[]], 2**63, 1e308, {"step": "aten"}])


def flip(data, generator):
    data = bytearray(data)
    for _ in range(generator.randrange(1, 4)):
        if data:
            data[generator.randrange(len(data))] = generator.randrange(256)
    if generator.random() < 0.3:
        del data[generator.randrange(len(data)) :]
    return bytes(data)


def mutate(bundle, generator):
    """Changes one thing in a bundle; returns what undoes it."""
    names = sorted(p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file())
    manifest = (bundle / "manifest.json").read_bytes()
    kind, name = generator.randrange(10), generator.choice(names)
    path = bundle / name
    before = path.read_bytes()
    extra = None
    if kind < 6:
        target = generator.choice(["plan.json", "plan.json", "plan.json", "aten.json", "manifest.json"])
        path = bundle / target
        before = path.read_bytes()
        path.write_text(json.dumps(mutate_value(json.loads(before), generator)))
        if target != "manifest.json":
            reseal(bundle, target)
    elif kind == 6:
        path.write_bytes(flip(before, generator))
    elif kind == 7 and name != "manifest.json":
        path.write_bytes(flip(before, generator))
        reseal(bundle, name)
    elif kind == 8:
        extra = bundle / generator.choice(["x", "kernels/x.py", "kernels/__init__.py", "ir/x", ".hidden"])
        extra.symlink_to("/etc/passwd") if generator.random() < 0.5 else extra.write_text("x")
    else:
        path.unlink()
        if generator.random() < 0.5:
            os.symlink("/etc/hostname", path)

    def undo():
        if extra is not None:
            extra.unlink()
        if path.is_symlink() or path.exists():
            path.unlink()
        path.write_bytes(before)
        (bundle / "manifest.json").write_bytes(manifest)

    return undo


@pytest.mark.parametrize("seed", range(4))
def test_mutated_bundles_give_only_topo_errors(good, tmp_path, seed):
    generator = random.Random(seed)
    bundle = Path(shutil.copytree(good, tmp_path / "bundle"))
    refused = 0
    for _ in range(300):
        undo = mutate(bundle, generator)
        try:
            load(bundle, "cpu", random_weights=0)
        except TopoError as error:
            assert error.message and "\n" not in error.render()
            refused += 1
        undo()
    assert refused > 200
    assert load(bundle, "cpu", random_weights=0)
