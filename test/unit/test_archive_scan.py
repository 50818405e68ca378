"""What torch.export writes passes the scan; what would run code, or is damaged, is refused by name."""

import json
import os
import pickle
import subprocess
import sys
import zipfile

import pt2_samples
import pytest
import torch

from topo_opt.errors import InputError, TopoError, UntrustedError
from topo_opt.frontend.archive_expr import BadExpression, check_expression, check_guard
from topo_opt.frontend.archive_scan import ScanLimits, scan

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return pt2_samples.save("mixed", tmp_path_factory.mktemp("pt2"))


@pytest.fixture(scope="module")
def contents(good):
    return pt2_samples.entries(good)


@pytest.mark.parametrize("name", pt2_samples.SAMPLES)
def test_accepts_what_torch_writes(name, tmp_path):
    info = scan(pt2_samples.save(name, tmp_path))
    assert info.schema_version[0] == 8 and info.torch_version == torch.__version__
    assert [model.name for model in info.models] == ["model"]


def test_describes_weights(good):
    model = scan(good).models[0]
    state = {payload.name: payload for payload in model.state}
    assert state["a.weight"].entry == state["b.weight"].entry and state["a.weight"].shape == (4, 4)
    assert state["view"].strides == (16, 1) and state["view"].storage_offset == 1
    assert [state[f"each.{i}"].dtype for i in range(len(pt2_samples.DTYPES))] == [
        str(dtype).removeprefix("torch.") for dtype in pt2_samples.DTYPES
    ]
    assert {payload.name for payload in model.constants} == {"constant", "table"}
    assert not any(payload.absent for payload in (*model.state, *model.constants))
    with good.open("rb") as file:
        file.seek(state["scalar"].offset)
        assert torch.frombuffer(bytearray(file.read(4)), dtype=torch.float32).item() == 3.0


def test_meta_weights_are_absent(tmp_path):
    with torch.device("meta"):
        module, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
    torch.export.save(torch.export.export(module, (x,), strict=False), tmp_path / "m.pt2")
    state = scan(tmp_path / "m.pt2").models[0].state
    assert [(p.name, p.shape, p.absent) for p in state] == [("weight", (2, 3), True), ("bias", (2,), True)]


def test_does_not_import_torch():
    program = "import sys, topo_opt.frontend.archive_scan; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# Wrong and damaged files


def _torchscript(path):
    torch.jit.save(torch.jit.trace(torch.nn.ReLU(), torch.ones(1)), str(path))


WRONG_FILES = {
    "empty": (lambda p: p.write_bytes(b""), "is empty"),
    "text": (lambda p: p.write_text("hello"), "is not a .pt2"),
    "python": (lambda p: p.write_text("import torch"), "Python source file"),
    "checkpoint": (lambda p: torch.save({"a": torch.ones(1)}, p), "torch.save file"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps([1])), "is a pickle"),
    "torchscript": (_torchscript, "TorchScript"),
    "safetensors": (lambda p: p.write_bytes(b"\x10" + b"\0" * 7 + b'{"a":1}         '), "safetensors"),
    "other zip": (
        lambda p: pt2_samples.write(p, {"archive_format": b"pt2", "byteorder": b"little"}),
        "without an exported",
    ),
    "folder": (lambda p: p.mkdir(), "is a folder"),
    "missing": (lambda p: None, "does not exist"),
    "elf": (lambda p: p.write_bytes(b"\x7fELF" + b"\0" * 100), "compiled library"),
    "zip without directory": (lambda p: p.write_bytes(b"PK\x03\x04" + b"\0" * 100), "damaged"),
}


@pytest.mark.parametrize("kind", WRONG_FILES)
@pytest.mark.filterwarnings("ignore")
def test_wrong_files_are_named(kind, tmp_path):
    make, message = WRONG_FILES[kind]
    path = tmp_path / ("model.py" if kind == "python" else "model.pt2")
    make(path)
    with pytest.raises(InputError, match=message) as info:
        scan(path)
    assert not isinstance(info.value, UntrustedError)
    assert "\n" not in info.value.render()
    if kind not in ("folder", "missing"):
        assert "torch.export.save" in info.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path, good):
    path = tmp_path / "m.pt2"
    path.write_bytes(good.read_bytes())
    path.chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        scan(path)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.999])
def test_truncated(good, tmp_path, fraction):
    data = good.read_bytes()
    (tmp_path / "cut.pt2").write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(InputError, match="damaged"):
        scan(tmp_path / "cut.pt2")


# Entries


def _added(name, data=b"x"):
    return lambda c: {**c, name: data}


ENTRIES = {
    "library": (_added("data/aotinductor/model/a.so"), "compiled library"),
    "custom object": (_added("data/constants/custom_obj_0"), "pickled object"),
    "opaque object": (_added("data/constants/opaque_obj_0"), "pickled object"),
    "legacy": (_added("serialized_state_dict.pt"), "before torch 2.8"),
    "legacy file": (lambda c: {"!version": b"1", "!serialized_constants.pt": b"x"}, "before torch 2.8"),
    "legacy weights": (_added("data/weights/model.pt"), "pickle"),
    "python": (_added("extra.py"), "is code"),
    "unknown": (_added("data/other"), "not one that torch.export writes"),
    "parent": (_added("extra/../../x"), "leaves the archive"),
    "absolute": (_added("!/etc/passwd"), "one folder"),
    "backslash": (_added("extra\\..\\x"), "leaves the archive"),
    "second root": (_added("!other/byteorder", b"little"), "one folder"),
    "duplicate": (lambda c: [*c.items(), ("byteorder", b"little")], "twice"),
    "folder": (_added("extra/"), "not one that torch.export writes"),
}


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_entries_not_on_the_list(kind, contents, tmp_path):
    change, message = ENTRIES[kind]
    with pytest.raises(UntrustedError, match=message) as info:
        scan(pt2_samples.write(tmp_path / "m.pt2", change(contents)))
    assert "--trust-model" in info.value.hint


def test_polyglot_is_refused(good, tmp_path):
    (tmp_path / "m.pt2").write_bytes(good.read_bytes() + good.read_bytes())
    with pytest.raises(InputError, match="before its first entry"):
        scan(tmp_path / "m.pt2")
    (tmp_path / "m.pt2").write_bytes(good.read_bytes() + b"tail")
    with pytest.raises(InputError, match="after its end"):
        scan(tmp_path / "m.pt2")


def test_rewritten_copy_is_accepted(contents, tmp_path):
    scan(pt2_samples.write(tmp_path / "m.pt2", {**contents, "extra/notes.txt": b"hello"}))


def test_names_that_disagree(contents, tmp_path):
    path = pt2_samples.write(tmp_path / "m.pt2", contents)
    pt2_samples.rename_local_header(path, "m/byteorder", "m/byteordeR")
    with pytest.raises(UntrustedError, match="another name in its own header"):
        scan(path)


def test_overlapping_entries(contents, tmp_path):
    path = pt2_samples.write(tmp_path / "m.pt2", contents)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("m/data/weights/weight_0")
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\x01\x02", info.header_offset)
    while bytes(data[at + 46 : at + 46 + len("m/data/weights/weight_0")]) != b"m/data/weights/weight_0":
        at = data.index(b"PK\x01\x02", at + 4)
    for field in (20, 24):  # compressed and full size
        data[at + field : at + field + 4] = (info.file_size + 40).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(UntrustedError, match="shares bytes"):
        scan(path)


def test_compression(contents, tmp_path):
    with pytest.raises(InputError, match="cannot be mapped"):
        scan(pt2_samples.write(tmp_path / "m.pt2", contents, compress=zipfile.ZIP_DEFLATED))
    bomb = {**contents, "extra/zeros": b"\0" * (1 << 20)}
    with pytest.raises(UntrustedError, match="compressed more than 200:1"):
        scan(pt2_samples.write(tmp_path / "b.pt2", bomb, compress=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    "limits, message",
    [
        (ScanLimits(entries=3), "more than 3"),
        (ScanLimits(json_bytes=100), "more than 100"),
        (ScanLimits(total_bytes=100), "beyond 100 bytes"),
        (ScanLimits(json_depth=3), "deeper than 3"),
    ],
)
def test_limits(good, limits, message):
    with pytest.raises(UntrustedError, match=message):
        scan(good, limits=limits)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 5000, b'"' * 100_001, b'"\\' * 100_001])
def test_deep_or_unbalanced_json_is_cheap(contents, tmp_path, raw):
    with pytest.raises(InputError, match=r"deeper than|not JSON"):
        scan(pt2_samples.write(tmp_path / "m.pt2", {**contents, MODEL: raw}))


def test_duplicate_keys(contents, tmp_path):
    raw = contents[MODEL].replace(b'{"graph_module"', b'{"guards_code": [], "graph_module"', 1)
    with pytest.raises(UntrustedError, match="same key twice"):
        scan(pt2_samples.write(tmp_path / "m.pt2", {**contents, MODEL: raw}))


@pytest.mark.parametrize("entry", [MODEL, WEIGHTS, CONSTANTS, "data/weights/weight_0"])
def test_missing_entries(contents, tmp_path, entry):
    with pytest.raises(InputError, match=r"missing|without an exported"):
        scan(pt2_samples.write(tmp_path / "m.pt2", {k: v for k, v in contents.items() if k != entry}))


# The program

INJECTION = "x):\n  pass\nopen('owned', 'w')\ndef f(y"


def _graph(document):
    return document["graph_module"]["graph"]


def _first_tensor(document):
    return next(iter(_graph(document)["tensor_values"].values()))


def _signature(document):
    return document["graph_module"]["module_call_graph"][0]["signature"]


def _set(place, key, value):
    place[key] = value


def _tree(kind, context):
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


ENUM = json.dumps({"__enum__": True, "fqn": "antigravity:X", "name": "y"})
FACTORY = {"default_factory_module": "os", "default_factory_name": "system", "dict_context": ["a"]}
KEYWORDS = json.dumps(
    [
        1,
        {
            "type": "builtins.tuple",
            "context": "null",
            "children_spec": [
                {"type": "builtins.tuple", "context": "null", "children_spec": []},
                {"type": "builtins.dict", "context": json.dumps(["a, b=open(0)"]), "children_spec": []},
            ],
        },
    ]
)
EXPRESSION = {"as_expr": {"expr_str": "__import__('os').system('true')", "hint": None}}
PROGRAMS = {
    "expression": (lambda d: _first_tensor(d)["sizes"].append(EXPRESSION), "expr_str"),
    "guard": (lambda d: d["guards_code"].append("__import__('os')"), "guards_code"),
    "range key": (
        lambda d: _set(d["range_constraints"], "exec('1')", {"min_val": 1, "max_val": 2}),
        "range_constraints",
    ),
    "huge symbol": (
        lambda d: _set(d["range_constraints"], "u99999999999", {"min_val": 1, "max_val": 2}),
        "names",
    ),
    "operator": (lambda d: _set(_graph(d)["nodes"][0], "target", "torch.os.system"), "target"),
    "namespace": (
        lambda d: _set(_graph(d)["nodes"][0], "target", "torch.ops.c10d.send.default"),
        "namespace 'c10d'",
    ),
    "file operator": (
        lambda d: _set(_graph(d)["nodes"][0], "target", "torch.ops.aten.from_file.default"),
        "reaches files",
    ),
    "higher order": (
        lambda d: _set(_graph(d)["nodes"][0], "target", "torch.ops.higher_order.aoti_call_delegate"),
        "list of higher-order",
    ),
    "extension": (lambda d: _set(_graph(d)["nodes"][0], "target", "#x:y"), "target"),
    "node name": (lambda d: _set(_graph(d)["nodes"][0], "name", INJECTION), "identifier"),
    "tensor name": (lambda d: _set(_graph(d)["inputs"][0]["as_tensor"], "name", INJECTION), "not a name"),
    "keyword name": (lambda d: _set(_graph(d)["nodes"][0], "name", "lambda"), "identifier"),
    "argument name": (lambda d: _set(_graph(d)["nodes"][0]["inputs"][0], "name", INJECTION), "not a name"),
    "forward name": (lambda d: _set(_signature(d), "forward_arg_names", [INJECTION]), "identifier"),
    "parameter name": (
        lambda d: _set(
            d["graph_module"]["signature"]["input_specs"][0]["parameter"], "parameter_name", 'a")]'
        ),
        "name of a parameter",
    ),
    "enum": (lambda d: _set(_signature(d), "out_spec", _tree("builtins.tuple", ENUM)), "enum"),
    "factory": (
        lambda d: _set(_signature(d), "out_spec", _tree("collections.defaultdict", FACTORY)),
        "factory",
    ),
    "keyword arguments": (lambda d: _set(_signature(d), "in_spec", KEYWORDS), "identifier"),
    "deep tree": (lambda d: _set(_signature(d), "out_spec", "[1," + "[" * 90000), "tree spec"),
    "unknown field": (lambda d: _set(d, "on_load", "x"), "unknown field 'on_load'"),
    "unknown argument": (
        lambda d: _set(_graph(d)["nodes"][0]["inputs"][0], "arg", {"as_code": "x"}),
        "unknown kind 'as_code'",
    ),
    "custom object": (
        lambda d: _set(
            _graph(d)["nodes"][0]["inputs"][0], "arg", {"as_custom_obj": {"name": "a", "class_fqn": "b"}}
        ),
        "stored as a pickle",
    ),
    "operator argument": (
        lambda d: _set(_graph(d)["nodes"][0]["inputs"][0], "arg", {"as_operator": "torch.load"}),
        "not on the list of functions",
    ),
    "missing field": (lambda d: _graph(d).pop("nodes"), "lacks 'nodes'"),
    "wrong type": (lambda d: _set(_graph(d), "nodes", {}), "not a list"),
    "number for text": (lambda d: _set(_graph(d)["nodes"][0], "target", 3), "not an operator"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_not_on_the_list(kind, good, tmp_path):
    change, message = PROGRAMS[kind]
    with pytest.raises(UntrustedError, match=message) as info:
        scan(pt2_samples.edit_json(good, tmp_path / "m.pt2", MODEL, change))
    assert "models/model.json" in info.value.message


def test_other_schema_version(good, tmp_path):
    with pytest.raises(InputError, match="export schema 7"):
        scan(
            pt2_samples.edit_json(
                good, tmp_path / "m.pt2", MODEL, lambda d: _set(d["schema_version"], "major", 7)
            )
        )


def test_custom_namespace_needs_consent(good, tmp_path):
    path = pt2_samples.edit_json(
        good,
        tmp_path / "m.pt2",
        MODEL,
        lambda d: _set(_graph(d)["nodes"][0], "target", "torch.ops.mylib.f.default"),
    )
    with pytest.raises(UntrustedError, match="mylib"):
        scan(path)
    scan(path, extra_namespaces=frozenset({"mylib"}))


def _meta(document):
    return document["config"]["a.weight"]["tensor_meta"]


PAYLOADS = {
    "pickle": (lambda d: _set(d["config"]["a.weight"], "use_pickle", True), "as a pickle"),
    "no meta": (lambda d: _set(d["config"]["a.weight"], "tensor_meta", None), "as a pickle"),
    "path": (lambda d: _set(d["config"]["a.weight"], "path_name", "../../x"), "name of an entry"),
    "no entry": (lambda d: _set(d["config"]["a.weight"], "path_name", "weight_999"), "missing"),
    "too large": (
        lambda d: _meta(d)["sizes"].append({"as_int": 2**40}) or _meta(d)["strides"].append({"as_int": 1}),
        "beyond",
    ),
    "large stride": (lambda d: _set(_meta(d)["strides"], 0, {"as_int": 2**50}), "beyond"),
    "negative": (lambda d: _set(_meta(d)["strides"], 0, {"as_int": -1}), "not a number"),
    "offset": (lambda d: _set(_meta(d), "storage_offset", {"as_int": 1}), "beyond"),
    "symbolic": (lambda d: _set(_meta(d)["sizes"], 0, {"as_expr": {"expr_str": "s0"}}), "not a number"),
    "rank": (lambda d: _meta(d)["sizes"].append({"as_int": 1}), "3 sizes and 2 strides"),
    "dtype": (lambda d: _set(_meta(d), "dtype", 99), "unknown dtype"),
    "layout": (lambda d: _set(_meta(d), "layout", 1), "unknown dtype or layout"),
    "name": (lambda d: _set(d["config"], "a']", d["config"]["a.weight"]), "name of a parameter"),
}


@pytest.mark.parametrize("kind", PAYLOADS)
def test_payloads(kind, good, tmp_path):
    change, message = PAYLOADS[kind]
    with pytest.raises(TopoError, match=message):
        scan(pt2_samples.edit_json(good, tmp_path / "m.pt2", WEIGHTS, change))


# Expressions

GOOD_EXPRESSIONS = [
    "s77",
    "2*s10",
    "Symbol('zuf0')",
    "Symbol('s77', positive=True, integer=True)",
    "Add(Mul(Integer(2), Symbol('s10', positive=True, integer=True)), Integer(-1))",
    "OpaqueUnaryFn_sqrt(ToFloat(Symbol('s10', integer=True)))",
    "Pow(Symbol('s70', integer=True), Integer(2))",
    "Mul(Float('0.5', precision=53), Symbol('s1'))",
    "Max(1, s25//2)",
    "s0**2 + (s1 - 1) % 8",
    "Ne(s0, 1) & (s1 <= 4)",
    "int_oo",
]
BAD_EXPRESSIONS = [
    "",
    "exec('1')",
    "s0.__class__",
    "().__class__",
    "lambda: 0",
    "[s0]",
    "s0 if s0 else s1",
    "Symbol('a b')",
    "Symbol(__import__('os'))",
    "Integer('0.5')",
    "print(s0)",
    "test",
    "s0; s1",
    "s0 := 1",
    "f'{s0}'",
    '"s0"',
    "s0(1)",
    "10**10**10",
    "s0**64**64",
    "1" + "**1" * 5000,
    "Pow(Integer(10), Integer(99999999))",
    "Pow(Integer(2), Mul(Integer(9), Integer(99999)))",
    "LShift(1, 1000000)",
    "1 << 1000000",
    "9" * 5000,
    "(" * 3000 + "1" + ")" * 3000,
    "(" * 200 + "1",
    "s0 +",
    "L['x'].size()[0]",
    "s99999999999",
]
GOOD_GUARDS = [
    "(L['a'][0].size()[2] // 2) != 1",
    "L['a'][1].size()[0] == (2*L['a'][0].size()[0])",
    "L['x'].stride()[0] >= 2 and L['kv cache']['k.0'].storage_offset() == 0",
    "math.floor(L['x'].size()[0] / 2) <= 8",
    "not Mod(L['x'].size()[0], 8) == 0",
]
BAD_GUARDS = [
    "L.__class__",
    "L['x'].__class__",
    "L['x'].size(0)",
    "L['x'].tolist()",
    "L['\"'][0] == 1",
    "L['{x}'] == 1",
    "L[s0] == 1",
    "L['x'].size()[0] == 1, exec('')",
    "torch.load('x')",
    "math.__class__",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD_EXPRESSIONS)
def test_good_expressions(text):
    check_expression(text)


@pytest.mark.parametrize("text", BAD_EXPRESSIONS, ids=lambda text: text[:30])
def test_bad_expressions(text):
    with pytest.raises(BadExpression):
        check_expression(text)


@pytest.mark.parametrize("text", GOOD_GUARDS)
def test_good_guards(text):
    check_guard(text)


@pytest.mark.parametrize("text", BAD_GUARDS)
def test_bad_guards(text):
    with pytest.raises(BadExpression):
        check_guard(text)
