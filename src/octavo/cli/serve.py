"""`octavo serve`: an OpenAI-compatible server.

Decides how its start and end look on a terminal. Invariant: the address and the executor are told
on stderr; stdout stays empty.
"""

import sys
from typing import Any

from octavo.config import EngineConfig, ServerConfig


def run_serve(model: str, *, engine: dict[str, Any], server: dict[str, Any]) -> None:
    """Serve a model until a signal."""
    engine_config = EngineConfig.from_dict({"model": model, **engine})
    server_config = ServerConfig.from_dict(server)
    # Imported late, so that wrong settings are told at once.
    from octavo.server.run import log_to_stderr, serve

    log_to_stderr()
    serve(engine_config, server_config, _tell)


def _tell(line: str) -> None:
    print(f"[{line}]", file=sys.stderr, flush=True)
