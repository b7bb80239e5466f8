"""Predicted latency and throughput of one machine over the batch size.

Decides what steady state means: every stream decodes at the middle of its answer, and each finished
request is replaced by one whose prompt is computed in chunks. Times are `cost.steps`'.

Invariant: figures are means of a machine without disturbance; queues are `fleet`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.cost.accounting import OperationCost, account
from octavo.cost.hardware import Machine
from octavo.cost.roofline import Bound, operation_time
from octavo.cost.steps import StepTimes
from octavo.program.program import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of one planned request."""

    prompt_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        """Prompt and answer together."""
        return self.prompt_tokens + self.output_tokens

    @property
    def middle(self) -> int:
        """Positions seen halfway through the answer."""
        return self.prompt_tokens + (self.output_tokens + 1) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One batch size. Times in seconds.

    decode_seconds: a step in which all streams decode. inter_token: mean between two tokens of a
    stream, other requests' prompts included. tokens_per_second: generated, prompts included.
    requests_per_second: finished. bound: what most of the decoding step waits for. intensity: its
    flops per byte. bandwidth_share: of the machine's peak.
    """

    batch: int
    decode_seconds: float
    inter_token: float
    tokens_per_second: float
    requests_per_second: float
    bound: Bound
    intensity: float
    bandwidth_share: float
    is_knee: bool = False


class Latency:
    """Predicts steps of planned requests. chunk_tokens: most tokens of a step."""

    def __init__(self, steps: StepTimes, lengths: Lengths, chunk_tokens: int) -> None:
        self.steps = steps
        self.lengths = lengths
        self.chunk_tokens = chunk_tokens

    def first_token(self, batch: int = 0) -> float:
        """Return the seconds from a prompt's first step to its first token.

        batch: streams that decode beside it and share its steps.
        """
        prompt, total = self.lengths.prompt_tokens, 0.0
        room = max(1, self.chunk_tokens - batch)
        decodes = [Chunk(1, self.lengths.middle)] * batch
        for start in range(0, prompt, room):
            end = min(start + room, prompt)
            is_last = end == prompt
            total += self.steps.of_chunks([Chunk(end - start, end), *decodes], batch + is_last)
        return total

    def decode(self, batch: int) -> float:
        """Return the seconds of a step in which `batch` streams decode."""
        contexts = np.full(batch, self.lengths.middle, np.int64)
        return self.steps.seconds(np.ones(batch, np.int64), contexts, batch)

    def residence(self, batch: int) -> float:
        """Return the seconds of a request among `batch`, each of which brings a prompt."""
        return self._extra_prompt(batch) * batch + self.lengths.output_tokens * self.decode(batch)

    def inter_token(self, batch: int) -> float:
        """Return the mean seconds between two tokens of a stream among `batch`."""
        delay = (batch - 1) * self._extra_prompt(batch)
        return self.decode(batch) + delay / self.lengths.output_tokens

    def requests_per_second(self, batch: int) -> float:
        """Return the rate at which `batch` streams finish (Little 1961)."""
        return batch / self.residence(batch)

    def row(self, batch: int) -> BatchRow:
        """Return the figures of a batch size."""
        decode, rate = self.decode(batch), self.requests_per_second(batch)
        prepared, machine = self.steps.prepared, self.steps.machine
        costs = account(prepared, [Chunk(1, self.lengths.middle)] * batch, batch)
        num_bytes = sum(cost.traffic.total for cost in costs)
        return BatchRow(
            batch=batch,
            decode_seconds=decode,
            inter_token=self.inter_token(batch),
            tokens_per_second=rate * self.lengths.output_tokens,
            requests_per_second=rate,
            bound=_main_bound(costs, machine),
            intensity=sum(cost.flops for cost in costs) / num_bytes,
            bandwidth_share=num_bytes / decode / machine.bandwidth,
        )

    def _extra_prompt(self, batch: int) -> float:
        """Return what a prompt adds to the steps of the streams beside it."""
        room = max(1, self.chunk_tokens - (batch - 1))
        num_steps = -(-self.lengths.prompt_tokens // room)
        beside = self.decode(batch - 1) * num_steps if batch > 1 else 0.0
        return self.first_token(batch - 1) - beside


def _main_bound(costs: Sequence[OperationCost], machine: Machine) -> Bound:
    seconds: dict[Bound, float] = {}
    for cost in costs:
        time = operation_time(cost, machine)
        seconds[time.bound] = seconds.get(time.bound, 0.0) + time.seconds
    return max(seconds, key=seconds.__getitem__)


def batch_sizes(most: int) -> list[int]:
    """Return powers of two up to `most`, and `most` itself."""
    sizes = [1 << power for power in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, most]


def knee(rows: Sequence[BatchRow]) -> int:
    """Return the batch size whose decoding steps have the most throughput per latency.

    Kleinrock 1979 ("Power and deterministic rules of thumb", ICC): beyond it, waiting grows faster
    than what is gained. With steps of a + b * batch seconds it is a / b.
    """
    return max(rows, key=lambda row: row.batch / row.decode_seconds**2).batch
