"""Links between the NUMA nodes of a host by what its processors are, following NCCL's table of rates."""

UNKNOWN = "smp-unspecified"
# Least model numbers of Intel's family 6, newest first: Emerald Rapids, Sapphire Rapids, Skylake.
_INTEL = (
    (0xCF, "smp-intel-emerald-rapids"),
    (0x8F, "smp-intel-sapphire-rapids"),
    (0x55, "smp-intel-skylake"),
)
_AMD = {23: "smp-amd-zen2", 25: "smp-amd-zen3", 26: "smp-amd-zen5"}


def socket_link(arch: str, vendor: str, family: int | None, model: int | None) -> str:
    """The figures of the link between two NUMA nodes; `smp-unspecified` where the processor is not known.

    Args:
        family, model: of the CPUID instruction; AMD's families above 15 also as RCCL writes them, base and extension as two
            nibbles (0xAF for 25).
    """
    arch, vendor = arch.lower(), vendor.lower()
    if arch in ("ppc64", "ppc64le"):
        return "smp-power9"
    if arch in ("arm64", "aarch64"):
        return "smp-grace" if "nvidia" in vendor else "smp-arm"
    if "intel" in vendor and model is not None:
        return next((name for least, name in _INTEL if model >= least), "smp-intel-broadwell")
    if "amd" in vendor and family is not None:
        if family > 0xF and family & 0xF == 0xF:
            family = 0xF + (family >> 4)
        return _AMD.get(family, UNKNOWN)
    if "shanghai" in vendor or "centaur" in vendor:
        return "smp-zhaoxin"
    return UNKNOWN


def peer_limit(arch: str, vendor: str) -> tuple[str, str] | None:
    """The class up to which NCCL uses peer access on these processors, with its source; None where there is no limit."""
    arch, vendor = arch.lower(), vendor.lower()
    if arch in ("arm64", "aarch64") or any(name in vendor for name in ("intel", "shanghai", "centaur")):
        return "PXB", (
            "NCCL src/graph/paths.cc: on processors of ARM, Intel and Zhaoxin peer access is used up to PXB unless "
            "NCCL_P2P_LEVEL says otherwise"
        )
    return None
