"""Offline embeddings: order, pooling, length, and prompts that are refused."""

import numpy as np
import pytest

from octavo import EmbeddingOutput
from octavo.errors import BadRequestError, ContextLengthError, InvalidParameterError
from tests.engines import assert_idle, tiny, tokens

PROMPTS = ["The sky", {"prompt": "A lake"}, tokens(40)]


@pytest.fixture(scope="module")
def llm():
    with tiny("llama", block_size=16) as made:
        yield made


def test_outputs_come_in_the_order_of_the_prompts_with_their_ids(llm):
    outputs = llm.embed(PROMPTS)
    assert [o.prompt for o in outputs] == ["The sky", "A lake", None]
    assert outputs[0].prompt_token_ids == llm.tokenizer.encode("The sky")
    assert len({o.embedding.tobytes() for o in outputs}) == 3
    assert all(isinstance(o, EmbeddingOutput) and o.error is None for o in outputs)
    assert_idle(llm.engine)


def test_a_vector_has_the_same_bits_alone_and_among_others(llm):
    alone = [llm.embed(prompt)[0].embedding.tobytes() for prompt in PROMPTS]
    assert [o.embedding.tobytes() for o in llm.embed(PROMPTS)] == alone


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_have_length_1_unless_declined(llm, pooling):
    (output,) = llm.embed("The sky", pooling=pooling)
    (raw,) = llm.embed("The sky", pooling=pooling, normalize=False)
    assert output.embedding.dtype == np.float32
    assert np.linalg.norm(output.embedding) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(raw.embedding) != pytest.approx(1, abs=1e-3)
    assert np.allclose(raw.embedding / np.linalg.norm(raw.embedding), output.embedding, atol=1e-6)


def test_the_mean_and_the_last_of_one_token_are_the_same_and_of_more_are_not(llm):
    def both(prompt):
        return [llm.embed(prompt, pooling=p)[0].embedding.tolist() for p in ("mean", "last")]

    one, more = both(tokens(1)), both(tokens(5))
    assert one[0] == one[1]
    assert more[0] != more[1]


def test_dimensions_cut_and_then_normalise(llm):
    (raw,) = llm.embed("The sky", normalize=False)
    (short,) = llm.embed("The sky", dimensions=5)
    cut = raw.embedding[:5]
    assert np.allclose(short.embedding, cut / np.linalg.norm(cut), atol=1e-6)


def test_the_last_tokens_are_kept_where_the_prompt_is_cut(llm):
    (cut,) = llm.embed(tokens(40), truncate_prompt_tokens=7)
    last = tokens(40)["prompt_token_ids"][-7:]
    assert cut.prompt_token_ids == last
    (alone,) = llm.embed({"prompt_token_ids": last})
    assert cut.embedding.tobytes() == alone.embedding.tobytes()


class TestRefusals:
    def test_a_single_refused_prompt_raises_and_one_of_a_list_tells_its_error(self, llm):
        too_long = tokens(llm.engine.intake.max_model_len + 1)
        with pytest.raises(ContextLengthError, match="Shorten it"):
            llm.embed(too_long)
        good, bad, empty = llm.embed(["The sky", too_long, {"prompt_token_ids": []}])
        assert good.embedding is not None
        assert isinstance(bad.error, ContextLengthError)
        assert isinstance(empty.error, BadRequestError)
        assert bad.embedding is None is empty.embedding
        assert_idle(llm.engine)

    @pytest.mark.parametrize("dimensions", [0, -1, 10_000])
    def test_dimensions_that_the_model_does_not_have(self, llm, dimensions):
        with pytest.raises(InvalidParameterError, match="the model's width"):
            llm.embed("The sky", dimensions=dimensions)

    def test_an_unknown_pooling_is_refused_before_any_work(self, llm):
        steps = llm.stats().step
        with pytest.raises(InvalidParameterError, match="mean or last"):
            llm.embed("The sky", pooling="max")
        assert llm.stats().step == steps

    def test_a_failed_step_is_told_with_each_prompt(self, llm, monkeypatch):
        def broken(batch):
            raise RuntimeError("out of order")

        monkeypatch.setattr(llm.engine.executor, "submit", broken)
        outputs = llm.embed(PROMPTS)
        assert [str(o.error) for o in outputs] == ["out of order"] * 3
        assert_idle(llm.engine)
