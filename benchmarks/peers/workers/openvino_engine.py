"""OpenVINO GenAI's pipeline for `closed_loop`: arguments are a folder, threads and KV blocks."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from closed_loop import obey


class OpenVINOEngine:
    """Adapts a continuous batching pipeline, stepped from here."""

    def __init__(self, pipeline: genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._handles: dict[int, list[Any]] = {}  # key: handle, tokens to come
        self._count = 0

    def add(self, prompt: list[int], output_tokens: int) -> int:
        """Queue a prompt of token ids; return its key."""
        config = genai.GenerationConfig()
        config.max_new_tokens = output_tokens
        config.ignore_eos = True
        config.do_sample = False
        key = self._count = self._count + 1
        ids = ov.Tensor(np.array([prompt], np.int64))
        self._handles[key] = [self._pipeline.add_request(key, ids, config), output_tokens]
        return key

    def step(self) -> Iterator[tuple[int, int, bool]]:
        """Run one step; yield (key, new tokens, finished) of each request that it advanced."""
        self._pipeline.step()
        for key, pending in list(self._handles.items()):
            handle, left = pending
            if not handle.can_read():
                continue
            new_tokens = sum(len(output.generated_ids) for output in handle.read().values())
            pending[1] = left - new_tokens
            if pending[1] <= 0:
                del self._handles[key]
            yield key, new_tokens, pending[1] <= 0

    def abort(self, keys: list[int]) -> None:
        """Drop all requests."""
        for key in keys:
            self._handles.pop(key)[0].cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()


def _open() -> tuple[OpenVINOEngine, dict[str, str]]:
    folder, threads, num_blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = num_blocks
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 64
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    return OpenVINOEngine(pipeline), {"openvino-genai": genai.__version__}


if __name__ == "__main__":
    obey(_open)
