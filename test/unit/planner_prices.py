"""Prices of machines that do not exist, for closed forms: every link alike, or islands with slow links between them."""

from __future__ import annotations

from dataclasses import dataclass, field

from topo_opt.collectives.kernels import KernelKind
from topo_opt.sharding.meshes import Closeness

# Passes over the buffer that a ring of n makes, times n / (n - 1), and rounds.
_RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Cost:
    """What a planner reads of a collective's cost."""

    seconds: float
    algorithm: str = "ring"
    bottleneck_kind: str = "nvlink"
    considered: tuple[tuple[str, float], ...] = ()
    link_kinds: tuple[str, ...] = ("nvlink",)

    def why(self) -> str:
        return f"{self.algorithm} {self.seconds * 1e6:.1f} us"


@dataclass(frozen=True)
class RingPrices:
    """`islands` of `size` devices; a ring inside an island takes `latency` and `1 / rate` a byte for each step, across islands the slow ones.

    Work takes operations over `ops_per_s` or bytes over `memory_bytes_per_s`, whichever is longer.
    """

    size: int = 8
    islands: int = 1
    rate: float = 400e9
    latency: float = 1e-6
    slow_rate: float = 10e9
    slow_latency: float = 20e-6
    ops_per_s: float = 600e12
    memory_bytes_per_s: float = 3e12
    capacity: int = 80_000_000_000
    launch_s: float = 0.0
    devices: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = tuple(f"gpu{i}" for i in range(self.size * self.islands))
        object.__setattr__(self, "devices", names)

    def island(self, device: str) -> int:
        return int(device.removeprefix("gpu")) // self.size

    def collective(self, kind: str, nbytes: int, groups: tuple[tuple[str, ...], ...]) -> Cost:
        n = len(groups[0])
        if n == 1:
            return Cost(0.0)
        inside = all(len({self.island(d) for d in group}) == 1 for group in groups)
        rate, latency = (self.rate, self.latency) if inside else (self.slow_rate, self.slow_latency)
        if kind in ("send", "broadcast"):
            return Cost(latency + nbytes / rate)
        rounds = _RINGS[kind] * (n - 1)
        return Cost(rounds * (latency + nbytes / n / rate))

    def compute(
        self,
        flops: float,
        nbytes: float,
        dtype: str,
        device: str,
        kind: KernelKind = "loops",
        shape: tuple[int, int, int] | None = None,
    ) -> float:
        return max(flops / self.ops_per_s, nbytes / self.memory_bytes_per_s)

    def start(self, kind: KernelKind, rows: int) -> float:
        return 0.0

    def call(self, device: str) -> float:
        return 0.0

    def launch(self, device: str) -> float:
        return self.launch_s

    def memory(self, device: str) -> int:
        return self.capacity

    def closeness(self) -> Closeness:
        """Nearness of all pairs for `plan`."""
        pairs = [(a, b) for a in self.devices for b in self.devices if a < b]
        return {(a, b): (int(self.island(a) != self.island(b)), 1.0) for a, b in pairs}
