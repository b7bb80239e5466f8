"""The server's engine in a child process against a thread: tokens/s and CPU time of the server.

Both servers are up at once and take turns under the same closed loop, so that a busy machine treats
them alike. CPU seconds are those of a server's processes over a run, the load generator's apart.
"""

import argparse
import json
from contextlib import ExitStack

from benchmarks.served import MODELS, Server
from octavo.planning.machine import describe_machine

FLAGS = {"child": "--engine-process", "thread": "--no-engine-process"}
PROMPT_TOKENS = 32


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=3, help="per stream")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        servers = {
            kind: stack.enter_context(Server(options.model, flag)) for kind, flag in FLAGS.items()
        }
        for streams in options.streams:
            for turn in range(options.rounds):
                for kind, server in servers.items():
                    number = options.requests * streams
                    figures = server.load(streams, number, PROMPT_TOKENS, options.tokens)
                    rows.append({"streams": streams, "round": turn, "engine": kind, **figures})
    print(json.dumps({"machine": describe_machine(), "model": options.model, "runs": rows}))


if __name__ == "__main__":
    main()
