"""What machines can do at most, and how much of that is reached.

Decides the table of known machines. A peak is published (`source` names where) or measured by
`octavo doctor`. Knows no model.

Invariant: rates are of dense products, never of the doubled figures with structured sparsity.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from octavo.errors import SettingError, nearest

GIB = 1 << 30


class Efficiency(NamedTuple):
    """Share of a machine's peaks that operations reach, and seconds that each costs at least.

    attention: of the rate of its products. cache: of the bandwidth between operations. unpacking:
    what readying weights for a tile of rows costs, in rows' worth of their products.
    """

    products: float
    memory: float
    overhead: float
    attention: float = 1.0
    cache: float = 1.0
    unpacking: float = 0.0


# Fitted on 387 measured linear layers of an A100 (`cost.fitting`, tests/cost). Fitted on one half,
# they are 4.3 % off in the median of the other and 9.5 % at the 95th percentile (medians of 50 ways
# to halve). Machines that nobody profiled are predicted with the same three numbers.
PROFILED = Efficiency(products=0.713, memory=0.793, overhead=5.8e-6, attention=0.713)
# A CPU starts no kernels: an operation costs a barrier between threads and its own entry. The
# shares are those above, for want of a profile.
CPU = PROFILED._replace(overhead=1e-6)
MEASURED = Efficiency(products=1.0, memory=1.0, overhead=1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine's limits.

    products: flops per second by weight format: bf16, int8, int4; a longer name such as int8_group
    may have its own. bandwidth: bytes per second from memory. cache_bandwidth: for values between
    operations, where they stay in a cache. cache_bytes: of the weights, that a step finds in a
    cache from the step before. far_weights: bytes that move from memory for each byte of weights;
    see `holding`. memory_bytes: for weights and KV cache together.
    step_overhead: seconds that a step costs beside its operations. row_overhead: for each row of
    logits beside its operations. instruction_set: of a CPU.
    """

    name: str
    title: str
    products: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory_bytes: int
    source: str
    efficiency: Efficiency = PROFILED
    cache_bandwidth: float | None = None
    cache_bytes: float = 0.0
    far_weights: float = 1.0
    step_overhead: float = 0.0
    row_overhead: float = 0.0
    instruction_set: str | None = None

    @property
    def is_cpu(self) -> bool:
        """Whether cores run the operations, which both multiply and fetch."""
        return self.instruction_set is not None

    def rate(self, form: str) -> float:
        """Return the peak flops per second of products with weights of a format."""
        stem = form.partition("_")[0]
        return self.products.get(form) or self.products.get(stem) or self.products["bf16"]

    def holding(self, weights: float) -> "Machine":
        """Return the machine as a program whose steps read so many bytes of weights sees it.

        What stays in a cache from step to step moves at its rate: as fewer bytes from memory would.
        """
        if not self.cache_bytes or not self.cache_bandwidth:
            return self
        held = min(self.cache_bytes / weights, 1.0)
        return replace(self, far_weights=1 - held * (1 - self.bandwidth / self.cache_bandwidth))

    def worked_rows(self, rows: int) -> float:
        """Return the rows' worth of products that a matrix costs with so many rows.

        A CPU's tile has a fixed number of rows, and one that is not full costs as much (but for a
        few small sizes); weights are unpacked for each tile. Elsewhere the rows are all there is.
        """
        sizes = self._tiles(rows)
        if not sizes:
            return rows
        num_full, rest = divmod(rows, sizes[-1])
        padded = num_full * sizes[-1] + (next(s for s in sizes if s >= rest) if rest else 0)
        return padded + self.num_tiles(rows) * self.efficiency.unpacking

    def num_tiles(self, rows: int) -> int:
        """Return how many tiles of rows a product has; 0 where the machine is not known to."""
        sizes = self._tiles(rows)
        return -(-rows // sizes[-1]) if sizes else 0

    def _tiles(self, rows: int) -> tuple[int, ...]:
        """Return how many rows a tile can have, where there are so many; none if unknown."""
        name = self.instruction_set or ""
        return (_MANY_ROWS_TILES if rows >= _MANY_ROWS else _TILES).get(name) or _TILES.get(
            name, ()
        )

    def idle_rows(self, group: int) -> int:
        """Return how many rows of attention's tile are empty when one token attends.

        group: heads that share keys and values. Pages are converted for a tile, not for a row: one
        token costs nearly as much as fills it.
        """
        return -group % _ATTENTION_TILES.get(self.instruction_set or "", 1)

    def ridge(self, form: str = "bf16") -> float:
        """Return the flops per byte above which products and not memory are the limit."""
        efficiency = self.efficiency
        return self.rate(form) * efficiency.products / (self.bandwidth * efficiency.memory)


# Rows of the tiles of csrc/isa/products.h and amx.cpp, and of those that many rows have.
_TILES: Mapping[str, tuple[int, ...]] = {
    "amx": (16,),
    "avx512_bf16": (1, 4, 8),
    "avx512": (1, 4, 8),
    "avx2": (1, 4),
    "generic": (1, 4),
}
_MANY_ROWS = 17
_MANY_ROWS_TILES: Mapping[str, tuple[int, ...]] = {"avx512_bf16": (4,), "avx512": (4,)}


def _products(bf16: float, int8: float) -> dict[str, float]:
    """4-bit weights meet 8-bit activations; 8-bit ones meet 16 bits, in two products of 8."""
    return {"bf16": bf16, "int8": int8 / 2, "int4": int8}


# Rows that one pass over pages of 16-bit numbers serves, in csrc/isa/attention.h and amx.cpp.
_ATTENTION_TILES: Mapping[str, int] = {
    "amx": 16,
    "avx512_bf16": 4,
    "avx512": 8,
    "avx2": 3,
    "generic": 4,
}


_HOPPER = _products(989.4e12, 1978.9e12)

MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="a100",
            title="NVIDIA A100 SXM 80 GB",
            products=_products(312e12, 624e12),
            bandwidth=2.039e12,
            memory_bytes=80_000_000_000,
            source="NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM column",
        ),
        Machine(
            name="h100",
            title="NVIDIA H100 SXM 80 GB",
            products=_HOPPER,
            bandwidth=3.35e12,
            memory_bytes=80_000_000_000,
            source="NVIDIA H100 Tensor Core GPU Architecture whitepaper, table of peak rates (SXM5)"
            "; bandwidth of the H100 datasheet",
        ),
        Machine(
            name="h200",
            title="NVIDIA H200 SXM 141 GB",
            products=_HOPPER,
            bandwidth=4.8e12,
            memory_bytes=141_000_000_000,
            source="NVIDIA H200 Tensor Core GPU datasheet, SXM column; half of the sparse rates",
        ),
        Machine(
            name="l4",
            title="NVIDIA L4 24 GB",
            products=_products(121e12, 242e12),
            bandwidth=300e9,
            memory_bytes=24_000_000_000,
            source="NVIDIA L4 Tensor Core GPU datasheet; half of the sparse rates",
        ),
        Machine(
            name="xeon-8480",
            title="Intel Xeon Platinum 8480+, 56 cores, 8 x 32 GB DDR5-4800",
            # 16 x 16 x 32 products of bfloat16 take 16 cycles: 1024 per cycle and core.
            products=_products(56 * 2.0e9 * 2048, 56 * 2.0e9 * 4096),
            bandwidth=8 * 38.4e9,
            memory_bytes=256 * GIB,
            source="Intel ARK, Xeon Platinum 8480+ (cores, base clock, memory); AMX rates of the "
            "Intel 64 and IA-32 Architectures Optimization Reference Manual",
            efficiency=CPU,
            instruction_set="amx",
        ),
        Machine(
            name="epyc-9654",
            title="AMD EPYC 9654, 96 cores, 12 x 32 GB DDR5-4800",
            # One 512-bit VDPBF16PS, or VPDPBUSD, per cycle: 32 or 64 products.
            products=_products(96 * 2.4e9 * 64, 96 * 2.4e9 * 128),
            bandwidth=12 * 38.4e9,
            memory_bytes=384 * GIB,
            source="AMD EPYC 9654 product page (cores, base clock, memory); Software Optimization "
            "Guide for the AMD Zen 4 Microarchitecture (instruction rates)",
            efficiency=CPU,
            instruction_set="avx512_bf16",
        ),
        Machine(
            name="ryzen-7950x",
            title="AMD Ryzen 9 7950X, 16 cores, 2 x 32 GB DDR5-5200",
            products=_products(16 * 4.5e9 * 64, 16 * 4.5e9 * 128),
            bandwidth=2 * 41.6e9,
            memory_bytes=64 * GIB,
            source="AMD Ryzen 9 7950X product page (cores, base clock, memory); Software "
            "Optimization Guide for the AMD Zen 4 Microarchitecture (instruction rates)",
            efficiency=CPU,
            instruction_set="avx512_bf16",
        ),
    )
}

# bfloat16 flops per cycle and core; without such products, of float32 ones.
_PER_CYCLE: Mapping[str, int] = {
    "amx": 2048,
    "avx512_bf16": 64,
    "avx512": 64,
    "avx2": 32,
    "generic": 8,
}
_CLOCK = 2.0e9
_BANDWIDTH_PER_CPU = 10e9
_BANDWIDTH = 40e9


def assumed_machine(title: str, instruction_set: str, num_cpus: int, memory_bytes: int) -> Machine:
    """Return a careful guess at a machine that nobody has measured.

    A core at 2 GHz with its instruction set's products, and two channels of memory at most.
    """
    rate = _PER_CYCLE.get(instruction_set, _PER_CYCLE["generic"]) * _CLOCK * num_cpus
    return Machine(
        name="this",
        title=title,
        products=_products(rate, 2 * rate),
        bandwidth=min(_BANDWIDTH, _BANDWIDTH_PER_CPU * num_cpus),
        memory_bytes=memory_bytes,
        source="assumed from the instruction set; `octavo doctor` measures",
        efficiency=CPU,
        instruction_set=instruction_set,
    )


def machine_named(name: str) -> Machine:
    """Return a machine of the table; raises `SettingError` that lists them."""
    found = MACHINES.get(name.lower())
    if found is None:
        raise SettingError(
            f"There is no machine {name!r} in the table.{nearest(name.lower(), MACHINES)} It has "
            f"{', '.join(MACHINES)}; without --machine, plans are for this one."
        )
    return found
