"""`torch.compile(model, backend="topo")`.

The graph that Dynamo hands over is exported again, because only an export keeps `linear`, `layer_norm` and attention whole. It
is specialised for every combination of input shapes and integers that comes, up to `max_variants`; parameters are inputs. When a graph cannot
be compiled, or needs gradients, it runs eagerly with a warning that says why; `options={"strict": True}` makes that an error.
"""

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch._subclasses import FakeTensorMode

from topo_opt.errors import InputError, StrictError, TopoError, UnsupportedError

log = logging.getLogger(__name__)

Key = tuple[tuple[tuple[int, ...], torch.dtype] | int, ...]
"""Of every input that is kept: shape and dtype of a tensor, the value of an integer."""


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """What `torch.compile(options={...})` may hold. `topology` None: that of a H200 on a GPU, `cpu` otherwise. Tuning as
    `topo_opt.compile` has it."""

    level: int = 2
    topology: str | None = None
    strict: bool = False
    max_variants: int = 16
    tune: str | None = None
    tuning_cache: str | None = None
    tuning_data: Sequence[str] = ()
    tuning_time: float | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> "BackendOptions":
        """Raises InputError for a name that is not an option."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in options or {}:
            if name not in known:
                raise InputError(
                    f"backend 'topo' has no option '{name}'", hint=f"it has {', '.join(sorted(known))}"
                )
        return cls(**(options or {}))

    def check(self) -> None:
        """Raises InputError for a value that no compile would take: what is wrong with all graphs is no reason to run one eagerly."""
        from topo_opt import driver
        from topo_opt.tuning.cache import read_file

        options = driver.Options(
            str(self.topology or "cpu"),
            level=self.level,
            tune=self.tune,
            tuning_cache=self.tuning_cache,
            tuning_data=self.tuning_data,
            tuning_time_s=self.tuning_time,
        )
        _ = options.machine
        for place in options.tuning.data:
            read_file(place)


class EagerFallback(UserWarning):
    """A graph runs eagerly although `backend="topo"` was asked for."""


def topo(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The Dynamo backend: `graph` as a callable with the same inputs and outputs.

    Raises:
        InputError: unknown options, or a `mode`, which this backend does not have.
        StrictError: with `strict`, what would otherwise fall back.
    """
    if mode is not None:
        raise InputError(f"backend 'topo' has no mode '{mode}'", hint="use options={'level': 0...3}")
    chosen = BackendOptions.of(options)
    chosen.check()
    try:
        specializer = Specializer(graph, chosen)
        first = specializer.key(_hints([example_inputs[i] for i in specializer.kept]))
    except UnsupportedError as error:
        _fall_back(chosen, error.render(), cause=error)
        return graph.forward
    # The first shapes are compiled now, so that the time is spent where users of torch.compile expect it.
    with tracing(None):
        specializer.prepare(first)
    return specializer


class Specializer:
    """Compiled variants of one graph by the shapes and integers among its inputs.

    Raises:
        UnsupportedError: an input that is neither a tensor nor an integer.
    """

    def __init__(self, graph: fx.GraphModule, options: BackendOptions):
        self.eager, self.options = graph.forward, options
        self.graph, self.kept = without_size_inputs(graph)
        self.variants: dict[Key, Callable[..., Any] | None] = {}

    def __call__(self, *inputs: Any) -> Any:
        kept = [inputs[i] for i in self.kept]
        if torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in kept):
            hint = "call it under torch.no_grad() or torch.inference_mode()"
            _fall_back(self.options, "gradients are needed", hint=hint)
            return self.eager(*inputs)
        key = self.key(kept)
        if key not in self.variants:
            self.prepare(key)
        program = self.variants[key]
        return self.eager(*inputs) if program is None else tuple(program(*kept))

    @staticmethod
    def key(values: Sequence[torch.Tensor | int]) -> Key:
        """What a variant is compiled for."""
        return tuple((tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else int(v) for v in values)

    def prepare(self, key: Key) -> None:
        """Compiles the variant for these shapes and integers, or notes that it runs eagerly."""
        self.variants[key] = None
        if len(self.variants) > self.options.max_variants:
            varying = "shapes or integers" if any(isinstance(part, int) for part in key) else "shapes"
            reason = f"more than {self.options.max_variants} {varying} came"
            _fall_back(self.options, reason, hint="raise options['max_variants']")
            return
        try:
            self.variants[key] = self._compile(key)
        except TopoError as error:
            _fall_back(self.options, error.render(), cause=error)

    def _compile(self, key: Key) -> Callable[..., Any]:
        from topo_opt import api

        device = _device_of(self.graph)
        with FakeTensorMode():
            examples = tuple(
                part if isinstance(part, int) else torch.empty(part[0], dtype=part[1], device=device)
                for part in key
            )
        topology = self.options.topology or ("h200-x1" if device.type == "cuda" else "cpu")
        return api.compile(
            self.graph,
            examples,
            topology=topology,
            level=self.options.level,
            strict=self.options.strict,
            tune=self.options.tune,
            tuning_cache=self.options.tuning_cache,
            tuning_data=self.options.tuning_data,
            tuning_time=self.options.tuning_time,
            device=device,
        )


def _fall_back(
    options: BackendOptions, reason: str, *, hint: str | None = None, cause: Exception | None = None
) -> None:
    if options.strict:
        raise StrictError(f"backend 'topo': {reason}", hint=hint) from cause
    text = f"backend 'topo' runs a graph eagerly: {reason}" + (f" ({hint})" if hint else "")
    log.warning("%s", text)
    warnings.warn(text, EagerFallback, stacklevel=3)


def without_size_inputs(graph: fx.GraphModule) -> tuple[fx.GraphModule, tuple[int, ...]]:
    """A copy of `graph` without the inputs that say what others do, and the positions of those that it keeps.

    Dynamo passes symbolic sizes as inputs of their own. The size of a tensor input is read from there; any other integer is
    kept, and a variant is compiled for its value.

    Raises:
        UnsupportedError: an input that is used and is neither a tensor nor an integer.
    """
    graph = copy.deepcopy(graph)
    placeholders = graph.graph.find_nodes(op="placeholder")
    holders: dict[str, tuple[fx.Node, int]] = {}
    for node in placeholders:
        value = _example(node)
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    holders.setdefault(str(size.node.expr), (node, dim))
    kept = []
    for position, node in enumerate(placeholders):
        value = _example(node)
        if isinstance(value, torch.Tensor):
            kept.append(position)
        elif not node.users:
            graph.graph.erase_node(node)
        elif (holder := holders.get(str(getattr(getattr(value, "node", None), "expr", None)))) is not None:
            with graph.graph.inserting_after(placeholders[-1]):
                size = graph.graph.call_function(torch.ops.aten.sym_size.int, holder)
            node.replace_all_uses_with(size)
            graph.graph.erase_node(node)
        elif isinstance(value, int | torch.SymInt):
            kept.append(position)
        else:
            raise UnsupportedError(
                f"input {position} is a {type(value).__name__}, not a tensor or an integer"
            )
    graph.graph.lint()
    graph.recompile()
    return graph, tuple(kept)


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


def _hints(values: Sequence[Any]) -> list[torch.Tensor | int]:
    """The inputs with every symbolic size and integer replaced by the one that it had in the call being compiled."""
    return [
        torch.empty([_hint(s) for s in value.shape], dtype=value.dtype, device="meta")
        if isinstance(value, torch.Tensor)
        else _hint(value)
        for value in values
    ]


def _hint(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    if not size.node.has_hint():
        raise UnsupportedError(f"the size {size} of an input depends on data")
    return int(size.node.hint)


def _device_of(graph: fx.GraphModule) -> torch.device:
    for node in graph.graph.find_nodes(op="placeholder"):
        value = _example(node)
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")
