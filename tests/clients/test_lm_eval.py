"""`lm-eval` scores the model over HTTP as it does in process.

Runs in an environment of its own: the package brings datasets, pyarrow and scikit-learn.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from serving import LiveServer

HERE = Path(__file__).parent
TASKS = ["capitals_choice", "capitals_text"]


class InProcess(LM):
    """The model through `LLM`, in a process of Octavo's environment."""

    def __init__(self, python: Path, model: str) -> None:
        super().__init__()
        self._command = [str(python), str(HERE / "in_process.py")]
        self._model = model

    def _ask(self, name: str, fields: list[Any]) -> list[Any]:
        asked = {"model": self._model, "likelihoods": [], "texts": [], name: fields}
        done = subprocess.run(
            self._command, input=json.dumps(asked), capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)[name]

    def loglikelihood(self, requests: list[Instance], **_: Any) -> list[tuple[float, bool]]:
        pairs = [list(request.args) for request in requests]
        return [tuple(found) for found in self._ask("likelihoods", pairs)]

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        fields = [
            [prompt, options["until"], options["max_gen_toks"]]
            for prompt, options in (request.args for request in requests)
        ]
        return self._ask("texts", fields)

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        raise NotImplementedError


def evaluate(model: Any, **options: Any) -> dict[str, Any]:
    return lm_eval.simple_evaluate(
        model=model,
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(HERE / "tasks"), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )


def answers(found: dict[str, Any]) -> dict[str, list[Any]]:
    """Return what the model said to each document, exactly."""
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
        for task, samples in found["samples"].items()
    }


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(HERE / "tasks")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize("concurrency", [1, 4])
def test_scores_and_answers_are_those_in_process(
    server: LiveServer, model: str, octavo: Path, concurrency: int
) -> None:
    inside = evaluate(InProcess(octavo.with_name("python"), model))
    url = f"{server.api}/completions"
    options = {"model": model, "base_url": url, "num_concurrent": concurrency}
    outside = evaluate("local-completions", model_args=options)
    assert outside["results"]["capitals_choice"]["acc,none"] > 0.25  # better than guessing
    assert outside["results"] == inside["results"]
    assert answers(outside) == answers(inside)
