import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.program.ops import (
    Add,
    AddRMSNorm,
    Attention,
    ElementSizes,
    Embed,
    GatedActivation,
    Linear,
    Operation,
    Parameter,
    RMSNorm,
    Rope,
    Sample,
    SelectRows,
    Split,
    Value,
    WriteKV,
)

EVERY_KIND: list[Operation] = [
    Embed("x", "table", 100, 64, scale=8.0),
    RMSNorm("x", "n", "w", 64, 1e-5),
    AddRMSNorm("x", "y", "s", "n", "w", 64, 1e-5),
    Linear("x", "y", ("a", "b"), 64, (32, 16), ("a_bias", None)),
    Split("x", ("a", "b"), (32, 16)),
    Rope("x", "y", 4, 16, (1.0,) * 8),
    WriteKV("k", "v", 0, 2, 16),
    Attention("q", "o", 0, 4, 2, 16, 0.25),
    GatedActivation("g", "u", "y", 64, "silu"),
    Add("x", "y", "s", 64),
    SelectRows("x", "y", 64),
    Sample("l", 100),
]


def attention(window: int | None) -> Attention:
    return Attention("q", "o", 0, heads=4, kv_heads=2, head_dim=16, scale=0.25, window=window)


@given(
    rows=st.integers(1, 40),
    before=st.integers(0, 60),
    window=st.none() | st.integers(1, 70),
)
def test_attention_counts_the_pairs_that_a_mask_would_leave(rows, before, window):
    context = before + rows
    positions = range(before, context)
    pairs = sum(1 for p in positions for k in range(p + 1) if window is None or k > p - window)
    assert attention(window).seen(rows, context) == pairs


@given(first=st.integers(1, 20), second=st.integers(1, 20), window=st.none() | st.integers(1, 25))
def test_flops_do_not_depend_on_how_a_chunk_is_cut(first, second, window):
    op = attention(window)
    cut = op.flops(first, first) + op.flops(second, first + second)
    assert op.flops(first + second, first + second) == cut


NOT_ATTENTION = [op for op in EVERY_KIND if not isinstance(op, Attention)]


@pytest.mark.parametrize("op", NOT_ATTENTION, ids=lambda op: type(op).__name__)
def test_flops_and_activations_grow_with_rows_and_weights_do_not(op):
    sizes = ElementSizes()
    one, five = op.traffic(sizes, 1, 1), op.traffic(sizes, 5, 5)
    assert op.flops(5, 5) == 5 * op.flops(1, 1)
    assert five.activations == 5 * one.activations
    assert five.kv_written == 5 * one.kv_written
    if not isinstance(op, Embed):
        assert five.weights == one.weights


def test_linear_names_each_matrix_and_the_biases_that_it_has():
    op = Linear("x", "y", ("a", "b"), 64, (32, 16), ("a_bias", None))
    assert op.parameters == (
        Parameter("a", (32, 64)),
        Parameter("b", (16, 64)),
        Parameter("a_bias", (32,)),
    )
    assert op.outputs == (Value("y", 48),)
    assert op.flops() == 2 * 48 * 64 + 32


def test_weights_are_priced_by_their_own_size():
    op = Linear("x", "y", ("a", "b"), 64, (32, 16), (None, None))
    sizes = ElementSizes(weight={"a": 0.5, "b": 2.0}.__getitem__)
    assert op.traffic(sizes).weights == 32 * 64 * 0.5 + 16 * 64 * 2.0


def test_embedding_moves_one_row_of_its_table_per_token():
    op = Embed("x", "table", 100_000, 64)
    assert op.traffic(ElementSizes(activation=2.0), rows=3).weights == 3 * 64 * 4
    assert op.flops(3) == 0


def test_attention_reads_a_chunk_s_keys_and_values_once():
    sizes = ElementSizes(kv=2.0)
    assert attention(None).traffic(sizes, 8, 100).kv_read == 100 * 2 * 2 * 16 * 2
    assert attention(10).traffic(sizes, 8, 100).kv_read == 17 * 2 * 2 * 16 * 2


def test_split_is_free():
    op = Split("x", ("a", "b"), (32, 16))
    assert op.flops(9) == 0
    assert op.traffic(ElementSizes(), 9).total == 0
