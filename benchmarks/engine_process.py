"""The server's engine in a child process against a thread: tokens/s and CPU time of the server.

Both servers are up at once and take turns under the same closed loop, so that a busy machine treats
them alike. CPU seconds are those of a server's processes over a run, the load generator's apart.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from octavo.planning.machine import describe_machine

ROOT = Path(__file__).parent.parent
OCTAVO = (sys.executable, "-c", "from octavo.cli.main import main; main()")
MODELS = {"tiny": str(ROOT / "tests/golden/tiny/llama"), "smollm2-135m": "smollm2-135m"}
IDS = {"tiny": "5-290", "smollm2-135m": "1000-40000"}


class Server:
    """`octavo serve` with its engine in a child or in a thread."""

    def __init__(self, model: str, kind: str) -> None:
        flag = "--engine-process" if kind == "child" else "--no-engine-process"
        command = [*OCTAVO, "serve", MODELS[model], "--port", "0", flag, "--max-num-seqs", "64"]
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

    def close(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.communicate()


def cpu_seconds(pid: int) -> float:
    """Return the time that all threads of a process have computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(server: Server, model: str, streams: int, requests: int, tokens: int) -> dict[str, Any]:
    """Run one closed loop; return its rate and what it cost the server."""
    before = server.cpu_seconds()
    command = [
        *(*OCTAVO, "bench", "serve", "--base-url", server.address, "--json", "-"),
        *("--concurrency", str(streams), "--requests", str(requests), "--token-ids", IDS[model]),
        *("--prompt-tokens", "32", "--output-tokens", str(tokens)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    spent = {name: round(time - before[name], 2) for name, time in server.cpu_seconds().items()}
    return {
        "output_tokens_per_s": report["output_tokens_per_s"],
        "cpu_seconds": spent,
        "client_cpu_seconds": report["client_cpu_seconds"],
    }


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=3, help="per stream")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    servers = {kind: Server(options.model, kind) for kind in ("child", "thread")}
    rows = []
    try:
        for streams in options.streams:
            for turn in range(options.rounds):
                for kind, server in servers.items():
                    number = options.requests * streams
                    figures = load(server, options.model, streams, number, options.tokens)
                    rows.append({"streams": streams, "round": turn, "engine": kind, **figures})
    finally:
        for server in servers.values():
            server.close()
    print(json.dumps({"machine": describe_machine(), "model": options.model, "runs": rows}))


if __name__ == "__main__":
    main()
