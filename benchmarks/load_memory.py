"""What loading a model adds to a process, against the bytes of its packed weights.

The proportional set size is taken once everything is imported and once the engine has started, with
a small cache that nothing has touched. As an engine of `octavo serve`, whose prompts come as token
ids, and as `LLM`, which encodes them.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401 (imported lazily below, and no part of what a model adds)
import llguidance  # noqa: F401
import tokenizers  # noqa: F401

from octavo.config import EngineConfig
from octavo.engine.backend import choose_backend
from octavo.engine.load import open_model
from octavo.engine.start import start_engine
from octavo.models.registry import WeightReader, build_program
from octavo.planning.machine import describe_machine

MIB = 1 << 20


def pss_bytes() -> int:
    """Return this process's share of memory."""
    found = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return 1024 * int(found[1])


def packed_bytes(config: EngineConfig) -> int:
    """Return what a model's weights take as they are packed."""
    files = open_model(config.model)
    program = build_program(files.config)
    weights = WeightReader(files.config, program, files.source)
    return choose_backend(config, program).weight_bytes(program, weights)


def measure(model: str, *, encodes: bool) -> dict[str, Any]:
    """Load a model into this process."""
    config = EngineConfig(model=model, num_gpu_blocks_override=64)
    before = pss_bytes()
    started = start_engine(config, encodes=encodes)
    rise = pss_bytes() - before
    started.engine.close()
    packed = packed_bytes(config)
    return {
        "model": model,
        "as": "LLM" if encodes else "engine of a server",
        "packed_mib": round(packed / MIB, 1),
        "rise_mib": round(rise / MIB, 1),
        "ratio": round(rise / packed, 3),
    }


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "gemma3-270m"])
    parser.add_argument("--one", choices=("server", "llm"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.models[0], encodes=options.one == "llm")))
        return
    rows = []
    for model in options.models:
        for kind in ("server", "llm"):
            command = [sys.executable, "-m", "benchmarks.load_memory", "--one", kind]
            done = subprocess.run(
                [*command, "--models", model], capture_output=True, text=True, check=True
            )
            rows.append(json.loads(done.stdout))
    print(json.dumps({"machine": describe_machine(), "rows": rows}))


if __name__ == "__main__":
    main()
