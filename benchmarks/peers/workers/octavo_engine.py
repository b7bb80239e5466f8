"""Octavo's engine for `closed_loop`: arguments are a model and settings as JSON."""

import json
import sys
from collections.abc import Iterator

from closed_loop import obey

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.start import start_engine
from octavo.request import SamplingParams


class OctavoEngine:
    """Adapts Octavo's engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, prompt: list[int], output_tokens: int) -> str:
        """Queue a prompt of token ids; return its key."""
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        return self._engine.add({"prompt_token_ids": prompt}, params).request_id

    def step(self) -> Iterator[tuple[str, int, bool]]:
        """Run one step; yield (key, new tokens, finished) of each request that it advanced."""
        for delta in self._engine.step():
            if delta.error is not None:
                raise delta.error
            yield delta.request_id, len(delta.token_ids), delta.is_last

    def abort(self, keys: list[str]) -> None:
        """Drop all requests."""
        for key in keys:
            self._engine.abort(key)
        while self._engine.has_unfinished:
            self._engine.step()


def _open() -> tuple[OctavoEngine, dict[str, str]]:
    model, settings = sys.argv[1], json.loads(sys.argv[2])
    started = start_engine(EngineConfig.from_dict({"model": model, **settings}))
    return OctavoEngine(started.engine), {"executor": started.engine.executor.name}


if __name__ == "__main__":
    obey(_open)
