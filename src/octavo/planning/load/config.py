"""Each setting of a load once: name, type, default, help. Flags and docs are generated from here.

Decides defaults and which settings exclude each other. Imports nothing heavy, since the command
line reads it for its help. What becomes of the settings is `plan.py`'s.

Invariant: a `LoadConfig` that exists has passed each check that needs no file and no server.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import BadRequestError, InvalidParameterError

# What a request of good service may be limited in.
LIMITED = ("ttft", "tpot", "itl", "e2e")


def _setting(default: Any, help: str, shown: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "shown": shown})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Settings of one run. None is chosen from the others, as each help says."""

    base_url: str = _setting("http://127.0.0.1:8000", "Address of the server.")
    path: str = _setting("/v1/completions", "Route that completes token ids.")
    model: str | None = _setting(None, "Model to ask for.", "the first that the server lists")
    extra_body: str = _setting("{}", "JSON merged into each request; null removes a field.")
    timeout: float = _setting(600.0, "Seconds that one request may take.")
    requests: int | None = _setting(
        None, "Sessions to run.", "three per stream, at least 8; all of a trace"
    )
    prompt_tokens: int = _setting(128, "New tokens of each prompt.")
    output_tokens: int = _setting(128, "Tokens of each answer.")
    shared_prefix: int = _setting(0, "Tokens that all prompts begin with, before their own.")
    turns: int = _setting(1, "Turns of each session, sent one after another.")
    trace: str | None = _setting(None, "Take lengths and arrivals from this trace.")
    trace_speed: float = _setting(1.0, "2 sends the trace twice as fast.")
    trace_length_scale: float = _setting(1.0, "Multiply the trace's lengths by this.")
    trace_max_tokens: int | None = _setting(
        None, "Leave out lines with more tokens, prompt and answer together, after scaling."
    )
    token_ids: str = _setting("1000-40000", "Ids to draw prompts from, without the last.")
    seed: int = _setting(0, "Same seed, same prompts and arrivals.")
    concurrency: int | None = _setting(
        None,
        "Streams of a closed loop; in an open loop, most sessions at once.",
        "1; no limit in an open loop",
    )
    request_rate: float | None = _setting(
        None, "Sessions per second, whether or not the server keeps up: an open loop."
    )
    burstiness: float = _setting(
        1.0, "Shape of the gamma distributed gaps: 1 is Poisson, less comes in bursts."
    )
    closed: bool = _setting(False, "Ignore a trace's arrivals: a closed loop.")
    num_warmups: int = _setting(1, "Requests sent at first, all at once and not measured.")
    goodput: str | None = _setting(
        None, "Limits in ms that a good request keeps, on ttft, tpot, itl or e2e: ttft:500,tpot:50."
    )

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("concurrency", 1), ("num_warmups", 0), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidParameterError(name, value, f"at least {least}")
        if not 0 < self.timeout < math.inf:
            raise InvalidParameterError("timeout", self.timeout, "a number of seconds above 0")
        if self.closed and self.request_rate is not None:
            raise BadRequestError(
                "closed and request_rate exclude each other: a closed loop has no arrivals."
            )
        if self.trace is not None and self.turns > 1:
            raise BadRequestError("trace and turns exclude each other: a trace has its own work.")
        _ = self.url, self.limits, self.extra

    @property
    def url(self) -> str:
        """Where requests go."""
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidParameterError("base_url", self.base_url, "an http or https address")
        return self.base_url.rstrip("/") + "/" + self.path.lstrip("/")

    @property
    def limits(self) -> dict[str, float]:
        """Goodput's limits in seconds."""
        return {} if self.goodput is None else parse_goodput(self.goodput)

    @property
    def extra(self) -> dict[str, Any]:
        """Fields merged into each request."""
        try:
            fields = json.loads(self.extra_body)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise InvalidParameterError("extra_body", self.extra_body, "a JSON object")
        return fields


def parse_goodput(text: str) -> dict[str, float]:
    """Return limits in seconds from "ttft:500,tpot:50", which is in milliseconds."""
    limits: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, number = part.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if name not in LIMITED or not 0 < limit < math.inf:
            allowed = f"limits in ms on {', '.join(LIMITED)}, as in ttft:500,tpot:50"
            raise InvalidParameterError("goodput", text, allowed)
        limits[name] = limit / 1e3
    if not limits:
        raise InvalidParameterError("goodput", text, "limits in ms, as in ttft:500,tpot:50")
    return limits
