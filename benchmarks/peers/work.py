"""The works that are compared: what is asked of every engine, and what is read off.

Decides the rows of the table of record. Knows no engine and no clock.
Invariant: a work's prompts depend on its name and the repeat alone, so every engine gets the same,
and no prompt begins like one of another run.
"""

from dataclasses import dataclass

from octavo.planning.throughput import Load

SMALL = "smollm2-135m"
LARGE = "random-1b"
# Ids from 0 to this less one are in the vocabularies of both.
VOCABULARY = 49_152

# Memory of 16-bit keys and values that every engine is given; it holds any of the loads.
POOL_BYTES = 1_000_000_000
# And the pool beside which memory is compared.
SMALL_POOL_BYTES = 250_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: a figure of a run, and what Octavo's share of the best peer must be.

    figure: its key. more_is_better: whether the best peer is the one with the most of it. must,
    aim: Octavo's figure over the best peer's; None where no such ratio is asked.
    """

    title: str
    figure: str
    more_is_better: bool
    must: float | None = None
    aim: float | None = None
    digits: int = 0

    def meets(self, ratio: float) -> bool:
        """Return whether a ratio is as asked."""
        if self.must is None:
            return True
        return ratio >= self.must if self.more_is_better else ratio <= self.must


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One piece of work on one model. load: None is the start of a fresh process."""

    name: str
    model: str
    load: Load | None
    rows: tuple[Row, ...]

    @property
    def streams(self) -> int:
        """Requests in flight."""
        return self.load.streams if self.load else 8

    @property
    def tokens_per_stream(self) -> int:
        """Most tokens of a prompt and its answer."""
        if self.load is None:
            return 1024
        return self.load.shared_prefix + self.load.prompt_tokens + self.load.output_tokens

    @property
    def shares_prefix(self) -> bool:
        """Whether all prompts begin alike."""
        return self.load is not None and self.load.shared_prefix > 0

    @property
    def pool_bytes(self) -> int:
        """Memory for keys and values of 16 bits."""
        return POOL_BYTES if self.load else SMALL_POOL_BYTES

    def prompts(self, repeat: int) -> tuple[list[int], list[list[int]]]:
        """Return the shared prefix and the prompts of one repeat of a load."""
        assert self.load is not None
        return self.load.prompts(self.load.count, VOCABULARY, f"{self.name}/{repeat}")


def _rate(title: str, must: float, aim: float | None = None) -> tuple[Row, ...]:
    row = Row(
        title=f"{title}: tokens/s",
        figure="output_tokens_per_s",
        more_is_better=True,
        must=must,
        aim=aim,
        digits=1,
    )
    return (row,)


def _load(streams: int, prompt: int, output: int, requests: int, shared: int = 0) -> Load:
    return Load(
        streams=streams,
        prompt_tokens=prompt,
        output_tokens=output,
        num_requests=requests,
        shared_prefix=shared,
    )


WORKS = (
    Work(name="decode-1", model=SMALL, load=_load(1, 128, 128, 4), rows=_rate("128/128 x 1", 4.0)),
    Work(
        name="decode-8",
        model=SMALL,
        load=_load(8, 128, 128, 16),
        rows=_rate("128/128 x 8", 3.0, 4.0),
    ),
    Work(
        name="decode-32",
        model=SMALL,
        load=_load(32, 128, 128, 64),
        rows=_rate("128/128 x 32", 2.2, 3.5),
    ),
    Work(
        name="decode-64",
        model=SMALL,
        load=_load(64, 128, 128, 64),
        rows=_rate("128/128 x 64", 2.0, 3.0),
    ),
    Work(
        name="shared",
        model=SMALL,
        load=_load(16, 64, 64, 32, shared=1024),
        rows=_rate("1,024 shared + 64 / 64 x 16", 2.0, 5.0),
    ),
    Work(
        name="prompt",
        model=SMALL,
        load=_load(1, 2048, 2, 4),
        rows=(
            Row(
                title="2,048-token prompt: TTFT, ms",
                figure="ttft_p50_ms",
                more_is_better=False,
                must=0.65,
                aim=0.35,
            ),
        ),
    ),
    Work(
        name="1b-1",
        model=LARGE,
        load=_load(1, 128, 32, 3),
        rows=_rate("1B shape, int8, 128/32 x 1", 1.6),
    ),
    Work(
        name="1b-8",
        model=LARGE,
        load=_load(8, 128, 32, 8),
        rows=_rate("1B shape, int8, 128/32 x 8", 2.3),
    ),
    Work(
        name="start",
        model=SMALL,
        load=None,
        rows=(
            Row(
                title="process start to first token, s",
                figure="start_s",
                more_is_better=False,
                must=1.2,
                aim=1.0,
                digits=2,
            ),
            Row(
                title="PSS after load, pool of 0.25 GB, GB",
                figure="loaded_gb",
                more_is_better=False,
                must=0.8,
                aim=0.5,
                digits=2,
            ),
            Row(
                title="PSS after an answer, GB",
                figure="answered_gb",
                more_is_better=False,
                must=0.8,
                aim=0.5,
                digits=2,
            ),
        ),
    ),
)
