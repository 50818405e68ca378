"""What an input of `topo-opt` is, by its name and first bytes."""

from pathlib import Path
from typing import Literal

from topo_opt.errors import InputError

MODEL_SUFFIX = ".pt2"
MAKE_ONE = 'torch.export.save(torch.export.export(model, args), "model.pt2") makes one'
_NOT_EXPORTED = {
    ".pt": "a PyTorch checkpoint",
    ".pth": "a PyTorch checkpoint",
    ".ckpt": "a checkpoint",
    ".bin": "a file of weights",
    ".safetensors": "a file of weights",
    ".gguf": "a GGUF file",
    ".onnx": "an ONNX file",
    ".h5": "a Keras file",
    ".py": "Python source",
}
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def input_kind(name: str) -> Literal["model", "mlir"]:
    """`model` for `file.pt2` and `function=file.pt2`, `mlir` for everything that may be MLIR.

    Raises:
        InputError: a folder, or a file of another kind; says what is expected.
    """
    if name.endswith(MODEL_SUFFIX):
        return "model"
    path = Path(name)
    if not path.exists():
        path = Path(name.rpartition("=")[2])
    if path.is_dir():
        bundle = (path / "manifest.json").is_file()
        raise InputError(
            f"{path} is a {'bundle' if bundle else 'folder'}, expected a {MODEL_SUFFIX} or MLIR file",
            hint=f"topo-run {path} runs a bundle" if bundle else MAKE_ONE,
        )
    what = _NOT_EXPORTED.get(path.suffix.lower()) or _by_content(path)
    if what is not None:
        raise InputError(
            f"{path} is {what}; topo-opt takes exported programs ({MODEL_SUFFIX}: weights and graph) and MLIR",
            hint=MAKE_ONE,
        )
    return "mlir"


def _by_content(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return None  # reported where the file is read
    if head == _ZIP:
        return f"a zip archive that is not called *{MODEL_SUFFIX}"
    return "a pickle" if head[:1] == _PICKLE else None
