"""An exported program, from a `.pt2` or from a module.

A `.pt2` is scanned first (`archive_scan`), then rebuilt from the checked JSON with its tensors mapped from the file. torch's
own reader, which unpickles parts of the file, is not used; the sample inputs stay unread.
"""

import contextlib
import importlib
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from topo_opt.errors import InputError, TopoError, UnsupportedError
from topo_opt.frontend.archive_scan import ArchiveInfo, ModelInfo, Payload, scan
from topo_opt.frontend.archive_trees import tree_types
from topo_opt.runtime.weights import TensorRange, WeightFile, Weights

# Libraries whose classes may stand in the tree specs of a model, and the modules that register them.
_TREE_MODULES = re.compile(r"(transformers\.(?:modeling_outputs|cache_utils|models\.\w+\.modeling_\w+))\.\w+")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_FOLDER = str(Path(torch.__file__).parent)


def load_archive(
    path: Path | str, trust: bool = False, *, extra_namespaces: Iterable[str] = ()
) -> ExportedProgram:
    """The exported program in the file at `path`; its tensors are mapped, not read.

    Args:
        trust: load with torch.export.load and no scan. That runs whatever code the file carries.
        extra_namespaces: `torch.ops` namespaces of custom operators that the caller trusts.

    Raises:
        InputError: not a `.pt2`, damaged, or one that this torch cannot read.
        UntrustedError: something in the file is not on the list of what is safe to load.
    """
    path = Path(path)
    if trust:
        return _load_trusted(path)
    return load_scanned(scan(path, extra_namespaces=frozenset(extra_namespaces)))


def load_scanned(info: ArchiveInfo, model: str | None = None) -> ExportedProgram:
    """The program `model` (by default the only one) of a scanned file.

    Raises:
        InputError: no such model, more than one to choose from, or torch cannot rebuild it.
    """
    chosen = _choose(info, model)
    _register_trees(chosen)
    weights = _mapped(info, chosen)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _rebuild(chosen, weights)
    except TopoError:
        raise
    except ImportError as exc:
        raise InputError(
            f"this torch ({torch.__version__}) has no reader for exported programs: {exc}"
        ) from exc
    except Exception as exc:
        raise _unreadable(info, exc) from exc


def export_module(
    module: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """`torch.export.export(module, args, kwargs, dynamic_shapes=..., strict=False)`.

    Raises:
        UnsupportedError: torch cannot export the module; names the line of the model and the first line of the reason.
    """
    try:
        # On some failures torch prints the graph it has so far; the diagnostic below replaces that.
        with contextlib.redirect_stderr(io.StringIO()):
            return torch.export.export(
                module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
    except Exception as exc:
        reason = _reason(exc)
        hint = "torch.export.draft_export(module, args) reports everything that is in the way"
        raise UnsupportedError(
            f"torch.export cannot export the model: {reason}", hint=hint, where=_where(exc)
        ) from exc


def _choose(info: ArchiveInfo, model: str | None) -> ModelInfo:
    names = [one.name for one in info.models]
    if model is None and len(names) > 1:
        raise InputError(
            f"{info.path} holds several programs: {', '.join(names)}", hint="save each in a file of its own"
        )
    for one in info.models:
        if model in (None, one.name):
            return one
    raise InputError(f"{info.path} has no program '{model}'", hint=f"it has {', '.join(names)}")


def _mapped(info: ArchiveInfo, model: ModelInfo) -> Weights:
    """The tensors of the file by name, prefixed: state and constants may use the same name."""
    entries = {
        f"{kind}/{payload.name}": _range(payload)
        for kind, payloads in (("state", model.state), ("constants", model.constants))
        for payload in payloads
    }
    return Weights(info.path.parent, [WeightFile(info.path.name, info.file_bytes)], entries)


def _range(payload: Payload) -> TensorRange:
    file = None if payload.nbytes == 0 else 0
    place = (payload.storage_offset, file, payload.offset, payload.nbytes)
    return TensorRange(payload.dtype, payload.shape, payload.strides, *place)


def _rebuild(model: ModelInfo, weights: Weights) -> ExportedProgram:
    from torch._export.serde import schema, serialize

    state = {p.name: _tensor(weights, "state", p) for p in model.state}
    constants = {p.name: _tensor(weights, "constants", p) for p in model.constants}
    program = serialize._dict_to_dataclass(schema.ExportedProgram, model.program)
    # No example inputs: they are stored as a pickle, and nothing in the compiler needs them.
    return serialize.ExportedProgramDeserializer().deserialize(program, state, constants, b"")


def _tensor(weights: Weights, kind: str, payload: Payload) -> torch.Tensor:
    if payload.absent or payload.device == "meta":
        dtype = getattr(torch, payload.dtype)
        tensor = torch.empty_strided(payload.shape, payload.strides, dtype=dtype, device="meta")
    else:
        tensor = weights[f"{kind}/{payload.name}"]
    grad = payload.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    if payload.is_param:
        return torch.nn.Parameter(tensor, requires_grad=grad)
    return tensor.requires_grad_(grad) if grad else tensor


def _register_trees(model: ModelInfo) -> None:
    """Imports the library that registers an output class, such as the dataclasses of transformers."""
    registered = torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    signatures = [entry.get("signature") for entry in model.program["graph_module"]["module_call_graph"]]
    specs = [signature[key] for signature in signatures if signature for key in ("in_spec", "out_spec")]
    for name in sorted(set().union(*map(tree_types, specs))):
        known = _TREE_MODULES.fullmatch(name)
        if name in registered or known is None:
            continue
        try:
            importlib.import_module(known[1])
        except ImportError as exc:
            hint = "install transformers, the library the model was exported from"
            raise InputError(
                f"the model takes or returns {name}, which is not installed: {exc}", hint=hint
            ) from None


def _load_trusted(path: Path) -> ExportedProgram:
    if not path.exists():
        raise InputError(f"{path} does not exist")
    try:
        with path.open("rb") as file:
            return torch.export.load(file)  # type: ignore[arg-type]
    except Exception as exc:
        raise InputError(f"{path} cannot be loaded: {_reason(exc)}") from exc


def _unreadable(info: ArchiveInfo, exc: Exception) -> InputError:
    text = _reason(exc)
    unregistered = re.search(r"Deserializing ([\w.]+) in pytree is not registered", str(exc))
    if unregistered:
        hint = "import the library that registers it, and compile from Python with topo_opt.compile"
        return InputError(
            f"{info.path}: the model takes or returns {unregistered[1]}, which torch does not know", hint=hint
        )
    hint = f"it was written by torch {info.torch_version}, this is {torch.__version__}: save it again with this one"
    return InputError(f"{info.path} is damaged or from another torch: {text}", hint=hint)


def _reason(exc: BaseException) -> str:
    """The last line of the innermost cause that says something; torch's outer messages quote whole tracebacks."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if "Original exception Traceback" in str(exc):
        return lines[-1][:300]
    points = [line.removeprefix("- ") for line in lines[1:] if line.startswith("- ")][:1]
    return " ".join([*(lines[:1] or [type(exc).__name__]), *points])[:400]


def _where(exc: BaseException) -> str | None:
    """`file:line` in the user's model: from the traceback, or from the stack that the message quotes."""
    frames: list[tuple[str, str]] = []
    trace = exc.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, str(trace.tb_lineno)))
        trace = trace.tb_next
    own: Callable[[tuple[str, str]], bool] = lambda frame: _is_user_file(frame[0])  # noqa: E731
    quoted = [frame for frame in _FRAME.findall(str(exc)) if own(frame)]
    raised = [frame for frame in frames if own(frame)]
    # The export call itself is a frame of ours; frames of the model come after torch's.
    inside = (
        raised[-1:]
        if any(file.startswith(_TORCH_FOLDER) for file, _ in frames[: _last(frames, raised)])
        else []
    )
    for found in (inside, quoted[-1:]):
        if found:
            return ":".join(found[0])
    return None


def _last(frames: list[tuple[str, str]], raised: list[tuple[str, str]]) -> int:
    return frames.index(raised[-1]) if raised else 0


def _is_user_file(name: str) -> bool:
    return not name.startswith(("<", _TORCH_FOLDER)) and name != __file__
