"""What is done to the scores of an attention kernel before their softmax: scale, cap, and the tests of which keys a row may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from topo_opt.codegen.triton.attention_space import LOG2E, AttentionSpace
from topo_opt.codegen.triton.emit import Value
from topo_opt.codegen.triton.target import Precision
from topo_opt.codegen.triton.writer import Writer
from topo_opt.structured.index import Expr, symbol

NEVER = 'float("-inf")'


@dataclass(frozen=True)
class Bounds:
    """The keys that one loop visits, as source, and which tests its scores need."""

    low: str
    high: str
    keys: bool
    """The last block reaches past the keys."""
    rows: bool
    """Some row of the block may not see some key of a block."""


@dataclass
class AttentionScores(AttentionSpace):
    """Scores and masks of one attention kernel."""

    def _mask(self, key: Expr) -> Value:
        """The mask at a key, for the rows of the block."""
        assert self.problem.mask is not None
        shape = self.kernel.graph.values[self.problem.mask].shape or ()
        indices = self.problem.mask_indices(shape, [self._symbol("b"), self._head, self._query_row, key])
        return self.emitter.real(self.problem.mask, indices)

    @property
    def _reads_mask_ahead(self) -> bool:
        """Whether a block's mask is read while the block before it is worked on: bytes are too narrow for the pipelined copies
        that keys and values take, so each block would wait for them."""
        if self.problem.mask is None or self.problem.additive or self._mask_rows > 1:
            return False
        with self.emitter.rehearsal(Writer(), self.emitter.on_reduction):
            mask = self._mask(self._symbol("n"))
        return mask.is_load and "n" in mask.depends

    def _mask_of(self, axis: str) -> str:
        """Source of the mask over the keys of an axis, which is defined anew wherever this stands."""
        with self.emitter.assuming({}):
            return self.emitter.tensor(self._mask(symbol(axis, self.problem.keys)))

    def _masked_scores(self, scores: str, bounds: Bounds, tests: Sequence[str] = ()) -> str:
        """Scores of a block of keys with scale and mask applied; minus infinity where a row must not look, or where one of
        `tests` fails."""
        tests = list(tests)
        if self._reads_mask_ahead:
            tests.append("allowed")
            scores = self._scaled_scores(scores)
        else:
            scores, test = self._seen_scores(scores, self._symbol("n"))
            tests += test
        if bounds.rows:
            tests += self._bound_tests("n")
        if (
            bounds.keys
            and not (bounds.rows and self.problem.high)
            and (key_mask := self.emitter.axes["n"].mask)
        ):
            tests.append(key_mask)
        return self._where(tests, scores)

    def _scaled_scores(self, scores: str) -> str:
        """Scores with what comes before their maximum applied, but the mask."""
        bind, problem = self.writer.bind, self.problem
        if problem.softcap is not None:
            return self._capped(scores, problem.softcap)
        return bind(f"{scores} * {problem.scale!r}", "qk") if self._is_scaled_first else scores

    def _seen_scores(self, scores: str, key: Expr) -> tuple[str, list[str]]:
        """Scores of keys with scale and an additive mask applied, and the test of a boolean one."""
        scores = self._scaled_scores(scores)
        if self.problem.mask is None:
            return scores, []
        mask = self.emitter.tensor(self._mask(key))
        if self.problem.additive:
            return self.writer.bind(f"{scores} + {mask}", "qk"), []
        return scores, [mask]

    def _bound_tests(self, key: str) -> list[str]:
        """Tests of a key, as source, against the bounds of every row."""
        low = [self.writer.bind(f"{key} >= row_low", "c")] if self.problem.low else []
        return low + ([self.writer.bind(f"{key} < row_high", "c")] if self.problem.high else [])

    def _where(self, tests: Sequence[str], scores: str) -> str:
        """The scores where all tests hold, and minus infinity elsewhere."""
        if not tests:
            return scores
        return self.writer.bind(f"tl.where({' & '.join(tests)}, {scores}, {NEVER})", "qk")

    def _capped(self, scores: str, cap: float) -> str:
        """`cap * tanh(scale * scores / cap)`."""
        bind = self.writer.bind
        inner = f"{scores} * {self.problem.scale / cap!r}"
        if self.kernel.precision == Precision.EXACT:
            return bind(f"libdevice.tanh({inner}) * {cap!r}", "qk")
        # 1 - 2 / (1 + exp(2 x)) is right at both ends, where the exponential is infinite or 0.
        power = bind(f"tl.exp2({scores} * {2 * LOG2E * self.problem.scale / cap!r})", "qk")
        return bind(f"{cap!r} - {2 * cap!r} / ({power} + 1.0)", "qk")
