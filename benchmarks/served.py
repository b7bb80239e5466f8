"""A server of its own process for benchmarks, and loads that `octavo bench serve` sends to it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent
OCTAVO = (sys.executable, "-c", "from octavo.cli.main import main; main()")
MODELS = {"tiny": str(ROOT / "tests/golden/tiny/llama"), "smollm2-135m": "smollm2-135m"}
IDS = {"tiny": "5-290", "smollm2-135m": "1000-40000"}


class Server:
    """`octavo serve`; a context in which it runs. options: more of its command line."""

    def __init__(self, model: str, *options: str) -> None:
        self.model = model
        self._num_loads = 0
        command = [*OCTAVO, "serve", MODELS[model], "--port", "0", "--max-num-seqs", "64", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, "the server did not start"
            found = re.search(r"Ready: .* at (https?://\S+)/v1", line)
        self.address = found[1]

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time of the server's own process, and of its engine's where it has one."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        times = {"server": cpu_seconds(pid)}
        return {**times, "engine": cpu_seconds(int(children[0]))} if children else times

    def load_command(self, streams: int, requests: int, prompt: int, tokens: int) -> Sequence[str]:
        """Return what sends a closed loop of random prompts, which no load had before."""
        self._num_loads += 1  # prompts that were sent before would be found in the cache
        return [
            *(*OCTAVO, "bench", "serve", "--base-url", self.address, "--json", "-"),
            *("--concurrency", str(streams), "--requests", str(requests)),
            *("--prompt-tokens", str(prompt), "--output-tokens", str(tokens)),
            *("--token-ids", IDS[self.model], "--seed", f"{os.getpid()}{self._num_loads:03}"),
        ]

    def load(self, streams: int, requests: int, prompt: int, tokens: int) -> dict[str, Any]:
        """Run one closed loop; return its rate and what it cost the server and the client."""
        before = self.cpu_seconds()
        command = self.load_command(streams, requests, prompt, tokens)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        report = json.loads(done.stdout)
        spent = {name: round(time - before[name], 2) for name, time in self.cpu_seconds().items()}
        return {
            "output_tokens_per_s": report["output_tokens_per_s"],
            "cpu_seconds": spent,
            "client_cpu_seconds": report["client_cpu_seconds"],
        }

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cpu_seconds(pid: int) -> float:
    """Return the time that all threads of a process have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
