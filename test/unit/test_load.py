"""A scanned file loads to the program torch itself would load, and nothing in it runs."""

import io
import json
import pickle
from collections import OrderedDict

import pt2_samples
import pytest
import torch
from pt2_samples import Fn

from topo_opt.errors import InputError, TopoError, UnsupportedError, UntrustedError
from topo_opt.frontend.archive_scan import scan
from topo_opt.frontend.load import export_module, load_archive, load_scanned

MODEL = "models/model.json"
SAMPLE_INPUTS = "data/sample_inputs/model.pt"


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_tensors(got, expected):
    assert list(got) == list(expected)
    for name, left in got.items():
        right = expected[name]
        assert type(left) is type(right), name
        assert (left.dtype, left.shape, left.stride()) == (right.dtype, right.shape, right.stride()), name
        assert left.requires_grad == right.requires_grad, name
        assert torch.equal(raw(left), raw(right)), name


@pytest.mark.parametrize("name", pt2_samples.SAMPLES)
def test_equals_torch(name, tmp_path):
    path = pt2_samples.save(name, tmp_path)
    got, expected = load_archive(path), torch.export.load(path)
    assert str(got.graph) == str(expected.graph)
    assert str(got.graph_signature) == str(expected.graph_signature)
    assert got.range_constraints == expected.range_constraints
    assert str(got.call_spec.in_spec) == str(expected.call_spec.in_spec)
    assert_same_tensors(got.state_dict, expected.state_dict)
    assert_same_tensors(got.constants, expected.constants)
    _, args, kwargs, _ = pt2_samples.SAMPLES[name]
    left, right = (
        torch.utils._pytree.tree_leaves(program.module()(*_copies(args), **kwargs))
        for program in (got, expected)
    )
    for a, b in zip(left, right, strict=True):
        assert torch.equal(raw(a), raw(b)) if isinstance(a, torch.Tensor) else a == b


def _copies(args):
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in args]


def test_tied_weights_share_memory(tmp_path):
    state = load_archive(pt2_samples.save("mixed", tmp_path)).state_dict
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    assert state["a.bias"].data_ptr() != state["b.bias"].data_ptr()


def test_buffers_are_not_views_of_one_storage(tmp_path):
    """Two caches that shared a storage would be decomposed as views of one base, with other results."""

    class Caches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(2, 4))
            self.register_buffer("b", torch.zeros(3, dtype=torch.bfloat16))

        def forward(self, x):
            self.a.index_copy_(0, torch.tensor([1]), x)
            self.b.add_(1)
            return self.a.sum() + self.b.sum()

    torch.export.save(torch.export.export(Caches(), (torch.ones(1, 4),), strict=False), tmp_path / "m.pt2")
    program = load_archive(tmp_path / "m.pt2")
    state = program.state_dict
    assert state["a"].untyped_storage().data_ptr() != state["b"].untyped_storage().data_ptr()
    targets = [spec.target for spec in program.run_decompositions({}).graph_signature.output_specs]
    assert targets == ["a", "b", None]
    state["b"].add_(1)
    assert torch.equal(load_archive(tmp_path / "m.pt2").state_dict["b"], torch.zeros(3, dtype=torch.bfloat16))


def test_meta_weights(tmp_path):
    with torch.device("meta"):
        module, x = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 5)), torch.ones(1, 3)
    torch.export.save(torch.export.export(module, (x,), strict=False), tmp_path / "m.pt2")
    state = load_archive(tmp_path / "m.pt2").state_dict
    assert {name: (value.device.type, tuple(value.shape)) for name, value in state.items()} == {
        "0.weight": ("meta", (2, 3)),
        "0.bias": ("meta", (2,)),
        "1.weight": ("meta", (5, 2)),
        "1.bias": ("meta", (5,)),
    }


class Payload:
    """Unpickling it makes the file `owned`."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_sample_inputs_are_not_unpickled(how, tmp_path):
    path = pt2_samples.save("sizes", tmp_path)
    owned = tmp_path / "owned"
    if how == "pickle":
        data = pickle.dumps(Payload(owned))
    else:
        buffer = io.BytesIO()
        torch.save((Payload(owned),), buffer)
        data = buffer.getvalue()
    hostile = pt2_samples.write(tmp_path / "h.pt2", {**pt2_samples.entries(path), SAMPLE_INPUTS: data})
    assert load_archive(hostile).example_inputs is None
    assert not owned.exists()
    with pytest.raises(TopoError):
        load_archive(hostile, trust=True)
    assert owned.exists(), "the payload works, so the test above means something"


def _with_node_name(document, name):
    graph = document["graph_module"]["graph"]
    old = graph["inputs"][0]["as_tensor"]["name"]
    text = json.dumps(document).replace(f'"{old}"', json.dumps(name))
    document.clear()
    document.update(json.loads(text))


def test_names_in_generated_source_are_not_run(tmp_path):
    """torch writes argument names into Python source: a name that ends the function would run code at the load."""
    path = pt2_samples.save("specials", tmp_path)
    owned = tmp_path / "owned"
    name = f"a=0):\n    pass\nopen({str(owned)!r}, 'w')\ndef forward(self, a_0"
    hostile = pt2_samples.edit_json(path, tmp_path / "h.pt2", MODEL, lambda d: _with_node_name(d, name))
    with pytest.raises(UntrustedError, match="not a name"):
        load_archive(hostile)
    assert not owned.exists()


def test_expression_is_not_evaluated(tmp_path):
    path = pt2_samples.save("sizes", tmp_path)
    owned = tmp_path / "owned"

    def change(document):
        values = document["graph_module"]["graph"]["tensor_values"]
        next(iter(values.values()))["sizes"][0] = {
            "as_expr": {"expr_str": f"open({str(owned)!r}, 'w')", "hint": None}
        }

    hostile = pt2_samples.edit_json(path, tmp_path / "h.pt2", MODEL, change)
    with pytest.raises(UntrustedError, match="expr_str"):
        load_archive(hostile)
    with pytest.raises(TopoError):
        load_archive(hostile, trust=True)
    assert owned.exists(), "torch evaluates it, so the scan is needed"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda d: d["graph_module"]["graph"]["nodes"][0].update(target="torch.ops.aten.nothing.default"),
            "damaged",
        ),
        (lambda d: d["graph_module"]["graph"]["nodes"].pop(0), "damaged"),
    ],
)
def test_inconsistent_programs_are_one_line(change, message, tmp_path):
    path = pt2_samples.edit_json(pt2_samples.save("sizes", tmp_path), tmp_path / "h.pt2", MODEL, change)
    with pytest.raises(InputError, match=message) as info:
        load_archive(path)
    assert "\n" not in info.value.render()


def test_unregistered_output_class(tmp_path):
    def change(document):
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = signature["out_spec"].replace("builtins.tuple", "mylib.Output", 1)

    path = pt2_samples.edit_json(pt2_samples.save("sizes", tmp_path), tmp_path / "h.pt2", MODEL, change)
    with pytest.raises(InputError, match=r"mylib\.Output, which torch does not know"):
        load_archive(path)


def test_transformers_output_class_is_imported(tmp_path):
    pytest.importorskip("transformers")
    from transformers.modeling_outputs import BaseModelOutput

    module = Fn(lambda x: BaseModelOutput(last_hidden_state=x + 1))
    torch.export.save(torch.export.export(module, (torch.ones(2),), strict=False), tmp_path / "m.pt2")
    registry = torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    assert "transformers.modeling_outputs.BaseModelOutput" in registry
    assert torch.equal(
        load_archive(tmp_path / "m.pt2").module()(torch.ones(2)).last_hidden_state, torch.full((2,), 2.0)
    )


def test_several_programs(tmp_path):
    from torch.export.pt2_archive._package import package_pt2

    programs = {"one": pt2_samples.export("cond"), "two": pt2_samples.export("specials")}
    package_pt2(str(tmp_path / "m.pt2"), exported_programs=programs)
    info = scan(tmp_path / "m.pt2")
    assert [model.name for model in info.models] == ["one", "two"]
    with pytest.raises(InputError, match="several programs: one, two"):
        load_scanned(info)
    assert str(load_scanned(info, "two").graph) == str(programs["two"].graph)
    with pytest.raises(InputError, match="no program 'three'"):
        load_scanned(info, "three")


# Exporting


class DataDependent(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # the line the error names
            return x
        return x + 1


def _line_of(text):
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def test_export_error_names_the_line(capfd):
    with pytest.raises(
        UnsupportedError, match=r"torch.export cannot export the model: Could not guard"
    ) as info:
        export_module(DataDependent(), (torch.ones(2),))
    assert info.value.where == f"{__file__}:{_line_of('the line the ' + 'error names')}"
    assert "\n" not in info.value.render()
    assert "def forward" not in capfd.readouterr().err


def test_export_error_of_dynamic_shapes():
    module = Fn(lambda x: x if x.shape[0] == 4 else x + 1)
    with pytest.raises(UnsupportedError, match=r"Constraints violated.*specialized it to be a constant"):
        export_module(module, (torch.ones(4),), None, (({0: torch.export.Dim("batch")},),))


def test_export_with_keywords():
    program = export_module(
        pt2_samples.Keywords(), (pt2_samples.X,), {"scale": pt2_samples.X, "extra": {"k": pt2_samples.X}}
    )
    result = program.module()(pt2_samples.X, scale=pt2_samples.X, extra={"k": pt2_samples.X})
    assert torch.equal(result["r"], 2 * pt2_samples.X) and isinstance(result["o"], OrderedDict)
