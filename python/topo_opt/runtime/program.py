"""A loaded bundle that can be called.

    program = topo_opt.load("bundle", device="cuda")
    logits = program.decode(input_ids, cache_position)
    program.state.reset()

A call whose sizes the export left open but no variant was compiled for, or whose execution fails before it changed state, is
answered by the ATen program instead: the result is right, the reason is logged, counted in `program.fallbacks`, and an error
under `strict`. What the export did not leave open is refused (`admission`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from topo_opt.errors import InputError, StrictError, TopoError, UntrustedError
from topo_opt.runtime import pytree
from topo_opt.runtime.admission import check_exported, check_literal, check_separate
from topo_opt.runtime.aten_program import AtenProgram
from topo_opt.runtime.bundle import Bundle
from topo_opt.runtime.cuda import CudaExecutor, GraphMode
from topo_opt.runtime.executor import Executor, InterpretExecutor, VariantStatus
from topo_opt.runtime.launch_choice import LaunchMode
from topo_opt.runtime.memory import Fetch, Memory, State, declared_tensors, mutated_names
from topo_opt.runtime.plan import Function, Variant
from topo_opt.runtime.rank_parts import given_parts, returned_parts
from topo_opt.runtime.repeated_call import ArgumentOrder, KnownCall
from topo_opt.runtime.steps import StepFailed, plain_tensors
from topo_opt.runtime.variant_choice import differences, fits
from topo_opt.sharding.parts import global_shape

if TYPE_CHECKING:
    from topo_opt.runtime.ranks import Ranks

log = logging.getLogger("topo_opt.runtime")


_LISTED = 16
"""Buckets that a message names, at most."""


class Program:
    """Functions of a bundle, sharing weights and state. Calls from several threads run one after the other."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        device: torch.device,
        fetch: Fetch,
        random_seed: int | None = None,
        strict: bool = False,
        graphs: GraphMode = "auto",
        launch: LaunchMode = "auto",
        allow_ops: Collection[str] = (),
        static_results: bool = False,
        ranks: Ranks | None = None,
    ):
        self.bundle, self.plan, self.device, self.strict = bundle, bundle.plan, device, strict
        self.ranks = ranks
        """This process among those that run the program; None for a program of one device."""
        self.lock = threading.RLock()
        self.fallbacks: Counter[str] = Counter()
        """Calls that the ATen program answered, by reason."""
        self.aten = _aten_programs(bundle, allow_ops)
        declared = declared_tensors(self.plan, self.aten)
        with plain_tensors():
            self.memory = Memory(
                declared, mutated_names(self.plan, self.aten), fetch, device, self.lock,
                random_seed=random_seed, constants=_constants(bundle), ranks=ranks,
            )  # fmt: skip
        self._whole: Memory | None = None
        self.state = State(self.memory)
        self._rewritten: dict[str, set[str]] = {}
        self._static_results = static_results
        self._whole_variants: dict[int, Variant] = {}
        self._repeated: dict[str, KnownCall] = {}
        self._orders: dict[str, ArgumentOrder | None] = {}
        self.executor: Executor
        if device.type == "cuda":
            self.executor = CudaExecutor(
                bundle, self.memory, graphs=graphs, launch=launch, allow_ops=frozenset(allow_ops)
            )
        else:
            self.executor = InterpretExecutor(bundle, self.memory, allow_ops=frozenset(allow_ops))

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions."""
        return tuple(self.plan.functions)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the only function of the bundle."""
        if len(self.functions) != 1:
            raise InputError(
                f"the bundle has {len(self.functions)} functions, call one: {', '.join(self.functions)}"
            )
        return self.call(self.functions[0], *args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        plan = self.__dict__.get("plan")
        if plan is not None and name in plan.functions:
            return partial(self.call, name)
        listed = ", ".join(plan.functions) if plan is not None else "none"
        raise AttributeError(f"the program has no function {name!r}; it has {listed}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.functions]

    def __repr__(self) -> str:
        return f"<topo_opt Program {', '.join(self.functions)} of {self.bundle.path} on {self.device}>"

    def call(self, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls `function` with the arguments of the exported module; the result has the module's structure.

        Raises:
            InputError: arguments of the wrong structure, device, rank or kind of dtype.
            StrictError: `strict`, and the call could not be answered by the compiled kernels.
        """
        if self.ranks is None:
            return self._call(function, args, kwargs)
        with self.ranks.calling(function):
            return self._call(function, args, kwargs)

    def _call(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self._entry(function)
        with self.lock:
            self._refresh()
            order = self._orders.get(function)
            leaves = order.leaves(args, kwargs) if order is not None else None
            repeated = self._repeated.get(function)
            if leaves is not None and repeated is not None and repeated.accepts(leaves):
                results = repeated(leaves)
            else:
                # Also where an argument is missing or not known: this says which.
                leaves = pytree.flatten_call(entry.in_tree, self.input_names(function), args, kwargs)
                results = self._call_flat(function, leaves)
        if entry.out_tree is not None:
            return pytree.unflatten(entry.out_tree, results)
        return results[0] if len(results) == 1 else tuple(results)

    def call_flat(self, function: str, leaves: Sequence[Any]) -> list[Any]:
        """Calls `function` with the flat list of leaves; the flat list of results."""
        if self.ranks is None:
            return self._call_flat(function, leaves)
        with self.ranks.calling(function):
            return self._call_flat(function, leaves)

    def _call_flat(self, function: str, leaves: Sequence[Any]) -> list[Any]:
        with self.lock:
            self._refresh()
            repeated = self._repeated.get(function)
            if repeated is not None and repeated.accepts(leaves):
                return repeated(leaves)
            entry, leaves = self._entry(function), list(leaves)
            self._check_devices(function, leaves)
            mutated = self._mutated_inputs(function)
            if mutated:
                check_separate(function, self.input_names(function), leaves, mutated)
            variant = next((v for v in entry.variants if fits(self.whole_inputs(v), leaves)), None)
            if variant is None:
                return self._fall_back(function, leaves, self._mismatch(function, leaves))
            parts = given_parts(self.ranks, variant, leaves)
            try:
                results = returned_parts(self.ranks, variant, self.executor.run(variant, parts))
            except StepFailed as error:
                if self.ranks is not None:
                    raise self.ranks.call_failure(function, error.message) from error
                if error.mutated:
                    raise TopoError(
                        f"{function} failed after it had changed state: {error.message}",
                        hint="program.state.reset() gives the state its initial values again",
                    ) from error
                return self._fall_back(function, leaves, error.message)
            split = any(leaf.sharding for leaf in variant.inputs) or any(v.whole for v in variant.outputs)
            if not mutated and not split and not any(leaf.mutated for leaf in variant.inputs):
                again = self.executor.repeated(variant, own_results=not self._static_results)
                if again is not None:
                    self._repeated[function] = again
                    self._orders[function] = ArgumentOrder.of(entry.in_tree, self.input_names(function))
            return results

    def close(self) -> None:
        """Frees what calls have prepared, graphs above all, and leaves the other ranks.

        For several GPUs this comes before `torch.distributed.destroy_process_group`, which waits for graphs that have collectives.
        """
        with self.lock:
            self._repeated.clear()
            self.executor.close()
        if self.ranks is not None:
            self.ranks.close()

    def whole_inputs(self, variant: Variant) -> Variant:
        """The variant with the inputs as the caller gives them: whole, where every rank takes its part."""
        if self.ranks is None or not any(leaf.sharding for leaf in variant.inputs):
            return variant
        key = id(variant)
        if key not in self._whole_variants:
            mesh = self.ranks.mesh
            leaves = [
                leaf
                if leaf.sharding is None
                else replace(leaf, shape=global_shape(leaf.sharding, leaf.shape or (), mesh, leaf.whole))
                for leaf in variant.inputs
            ]
            self._whole_variants[key] = replace(variant, inputs=tuple(leaves))
        return self._whole_variants[key]

    def whole_state(self, name: str) -> torch.Tensor:
        """A state buffer as one tensor: a copy, put together from all ranks, all of which must call this."""
        value, declared = self.state[name].clone(), self.memory.declared[name]
        return value if self.ranks is None else self.ranks.whole(value, declared.dims, declared.shape)

    def _refresh(self) -> None:
        """Follows weights that the caller has changed in place: what was made of them is made again."""
        if self.memory.load_time.is_stale():
            self.executor.refresh()

    def variants(self, function: str) -> tuple[Variant, ...]:
        """The compiled variants of a function."""
        return self._entry(function).variants

    def status(self) -> list[VariantStatus]:
        """How each variant runs: captured as one graph or not, and why not."""
        return [self.executor.status(v) for f in self.plan.functions.values() for v in f.variants]

    def input_names(self, function: str) -> list[str]:
        """One name for each leaf of the function's arguments."""
        entry = self._entry(function)
        if entry.variants:
            return [leaf.name for leaf in entry.variants[0].inputs]
        program = self._aten(function)
        return [i.target for i in program.inputs if i.kind == "input"]

    def run_aten(self, function: str, leaves: Sequence[Any], *, commit: bool = True) -> list[Any]:
        """The function by its ATen program, op by op as eager PyTorch does it.

        Args:
            commit: write the new state and mutated inputs; False leaves them as they are.
        """
        program = self._aten(function)
        with self.lock:
            inputs = self.aten_inputs(function, leaves)
            results = program.run(inputs, self.device)
            outputs = []
            by_target = {i.target: value for i, value in zip(program.inputs, inputs)}
            for spec, value in zip(program.outputs, results):
                if spec.kind == "mutation":
                    if commit:
                        by_target[str(spec.target)].copy_(value)
                else:
                    outputs.append(value)
            return outputs

    def aten_inputs(self, function: str, leaves: Sequence[Any]) -> list[Any]:
        """The flat inputs of the ATen program: weights and state of this program, and the caller's leaves."""
        given = iter(self._open_leaves(function, leaves))
        out = []
        for entry in self._aten(function).inputs:
            if entry.kind != "input":
                out.append(self._named(entry.target))
                continue
            try:
                value = next(given)
            except StopIteration:
                raise InputError(f"{function} takes more than {len(leaves)} inputs") from None
            out.append(value)
        return out

    def _open_leaves(self, function: str, leaves: Sequence[Any]) -> list[Any]:
        """The leaves that the ATen program takes: it may hold the literals of the export itself."""
        entry = self._entry(function)
        expected = sum(i.kind == "input" for i in self._aten(function).inputs)
        if not entry.variants or len(leaves) == expected or len(leaves) != len(entry.variants[0].inputs):
            return list(leaves)
        specs = entry.variants[0].inputs
        for spec, leaf in zip(specs, leaves):
            if spec.kind == "literal":
                check_literal(function, spec.name, spec.value, leaf)
        return [leaf for spec, leaf in zip(specs, leaves) if spec.kind != "literal"]

    def _named(self, name: str) -> torch.Tensor:
        memory = self.memory if self.ranks is None else self._whole_memory()
        if name not in memory.tensors:
            raise UntrustedError(
                f"the ATen program reads {name!r}, which has no dtype and shape in the bundle"
            )
        if self.ranks is not None and name in self.state:
            return self.whole_state(name)
        return memory.tensors[name]

    def _whole_memory(self) -> Memory:
        """All of the weights, which the ATen program reads, on every rank: for checks."""
        if self._whole is None:
            plan = replace(self.plan, mesh=(), functions={})
            with plain_tensors():
                self._whole = Memory(
                    declared_tensors(plan, self.aten), (), self.memory.fetch, self.device, self.lock,
                    random_seed=self.memory.random_seed,
                )  # fmt: skip
        return self._whole

    def _entry(self, function: str) -> Function:
        if function not in self.plan.functions:
            raise InputError(f"there is no function {function!r}; the bundle has {', '.join(self.functions)}")
        return self.plan.functions[function]

    def _aten(self, function: str) -> AtenProgram:
        if function not in self.aten:
            raise InputError(f"the bundle has no ATen program for {function}")
        return self.aten[function]

    def _fall_back(self, function: str, leaves: list[Any], reason: str) -> list[Any]:
        if self.ranks is not None:
            raise InputError(f"{function} can't run on {self.ranks.count} ranks: {reason}")
        if self.strict:
            raise StrictError(f"{function} can't run on its compiled kernels: {reason}")
        if function not in self.aten:
            raise InputError(
                f"{function} can't run on its compiled kernels and has no ATen program: {reason}"
            )
        inputs = [i for i in self._aten(function).inputs if i.kind == "input"]
        check_exported(function, inputs, self._open_leaves(function, leaves))
        if not self.fallbacks[reason]:
            log.warning("%s runs as eager ATen: %s", function, reason)
        self.fallbacks[reason] += 1
        return self.run_aten(function, leaves)

    def _mutated_inputs(self, function: str) -> set[str]:
        """Names of the caller's inputs that the function rewrites."""
        if function not in self._rewritten:
            program = self.aten.get(function)
            given = [i.target for i in program.inputs if i.kind == "input"] if program else []
            targets = {o.target for o in program.outputs if o.kind == "mutation"} if program else set()
            names = self.input_names(function)
            self._rewritten[function] = {n for n, t in zip(names, given) if t in targets}
        return self._rewritten[function]

    def _check_devices(self, function: str, leaves: Sequence[Any]) -> None:
        for name, leaf in zip(self.input_names(function), leaves):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != self.device.type:
                raise InputError(
                    f"{function}: {name} is on {leaf.device}, the program runs on {self.device}",
                    hint=f"pass {name}.to({str(self.device)!r})",
                )

    def _mismatch(self, function: str, leaves: list[Any]) -> str:
        """Why no variant fits, told for the variant that comes closest."""
        entry = self._entry(function)
        if not entry.variants:
            return f"{function} is left to ATen as a whole: {entry.aten_reason}"
        candidates = [differences(self.whole_inputs(v), leaves) for v in entry.variants]
        best = min(candidates, key=len)
        sizes = [" ".join(f"{k}={n}" for k, n in v.bucket.items()) for v in entry.variants]
        tail = f"; {len(candidates)} variants were compiled" if len(candidates) > 1 else ""
        tail += f": {', '.join(sizes)}" if tail and all(sizes) and len(sizes) <= _LISTED else ""
        return best[0] + tail if best else "no variant fits"


def _aten_programs(bundle: Bundle, allow_ops: Collection[str]) -> dict[str, AtenProgram]:
    value = bundle.json("aten.json")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UntrustedError("aten.json should be an object of programs by function")
    return {
        str(k): AtenProgram(v, extra_namespaces=allow_ops, path=f"aten.{k}")
        for k, v in value.items()
        if k in bundle.plan.functions
    }


def _constants(bundle: Bundle) -> dict[str, torch.Tensor]:
    if not bundle.has("constants.safetensors"):
        return {}
    return _safetensors(bundle.file("constants.safetensors"))


def _safetensors(path: Path) -> dict[str, torch.Tensor]:
    import safetensors
    import safetensors.torch

    try:
        return safetensors.torch.load_file(str(path))
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise UntrustedError(f"{path.name} is not a safetensors file: {str(error)[:200]}") from None
