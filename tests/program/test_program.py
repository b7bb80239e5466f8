from dataclasses import replace

import pytest

from octavo.program.fuse import fuse
from octavo.program.ops import (
    Attention,
    ElementSizes,
    Linear,
    RMSNorm,
    Rope,
    Sample,
    SelectRows,
    WriteKV,
)
from octavo.program.program import Builder, Chunk, KVGroup, Program
from tests.program.networks import FAMILIES, network


def rewritten(kind, number=0, **changes):
    """The Llama network with the fields of one operation changed."""
    program = network()
    place = [i for i, op in enumerate(program.operations) if isinstance(op, kind)][number]
    operations = list(program.operations)
    operations[place] = replace(operations[place], **changes)
    return replace(program, operations=tuple(operations)), place


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (RMSNorm, {"x": "nowhere"}, "reads 'nowhere', which nothing before it defines"),
        (RMSNorm, {"width": 32}, "reads 'embedding' 32 wide, but it is 64"),
        (RMSNorm, {"out": "embedding"}, "defines 'embedding' a second time"),
        (RMSNorm, {"heads": 5}, "cannot part 64 elements among 5 heads"),
        (Linear, {"weights": ("layers.0.attention_norm",)}, "as (64, 64), but it is (64,)"),
        (Rope, {"frequencies": (1.0,)}, "has 1 frequencies for heads of 16"),
        (WriteKV, {"layer": 7}, "uses layer 7 of KV group 0, which is not there"),
        (WriteKV, {"layer": -1}, "uses layer -1 of KV group 0"),
        (WriteKV, {"group": 1}, "uses layer 0 of KV group 1"),
        (Attention, {"layer": 3}, "reads pages of layer 3 before they are written"),
        (Attention, {"window": 0}, "has a window of 0"),
        (Attention, {"kv_heads": 4}, "does not fit its KV group"),
    ],
)
def test_malformed_operation_is_named(kind, changes, problem):
    with pytest.raises(ValueError, match=kind.__name__) as caught:
        rewritten(kind, **changes)
    assert problem in str(caught.value)


def test_layer_is_not_written_twice():
    with pytest.raises(ValueError, match="writes the pages of layer 0 a second time"):
        rewritten(WriteKV, number=1, layer=0)


def without(program, kind):
    return replace(
        program, operations=tuple(op for op in program.operations if not isinstance(op, kind))
    )


def test_program_ends_in_the_one_sample():
    program = network()
    with pytest.raises(ValueError, match="one Sample, and it is the last"):
        without(program, Sample)
    with pytest.raises(ValueError, match="one Sample, and it is the last"):
        replace(program, operations=(*program.operations, program.operations[-1]))


def test_sample_reads_the_product_before_it():
    b = Builder()
    x = b.select_rows(b.embed("table", 10, 4))
    scores = b.linear(x, "head", 10)
    for end in (b.norm(scores, "norm", 1e-5), scores):
        with pytest.raises(ValueError, match="Sample reads the plain product that stands before"):
            b.sample(end, KVGroup(1, 1, 4), 8)
        b.operations.pop()


def test_nothing_is_added_to_the_vocabularys_product():
    b = Builder()
    x = b.select_rows(b.embed("table", 10, 4))
    other, scores = b.linear(x, "other", 10), b.linear(x, "head", 10)
    b.operations[-1] = replace(b.operations[-1], addend=other.name)
    with pytest.raises(ValueError, match="plain product"):
        b.sample(scores, KVGroup(1, 1, 4), 8)


def closed(b, x):
    return b.sample(b.linear(x, "head", 10), KVGroup(1, 1, 4), 8)


def test_rows_are_selected():
    b = Builder()
    with pytest.raises(ValueError, match="has SelectRows, and this one has none"):
        closed(b, b.embed("table", 10, 4))


def test_rows_are_selected_at_one_place():
    b = Builder()
    x = b.embed("table", 10, 4)
    y = b.norm(b.select_rows(x), "norm", 1e-5)
    with pytest.raises(ValueError, match=r"side by side, but operations \[1, 3\] do not"):
        closed(b, b.add(y, b.select_rows(x, "again")))


def write(b, x, layer):
    b.operations.append(WriteKV(x.name, x.name, layer, 1, 4))
    return x


def attend(b, x, layer):
    return b._add(Attention(x.name, "attended", layer, 1, 1, 4, 1.0))


@pytest.mark.parametrize(
    ("kind", "add"),
    [
        ("WriteKV", lambda b, x: write(b, x, layer=1)),
        ("Attention", lambda b, x: attend(b, x, layer=0)),
        ("Rope", lambda b, x: b.rope(x, 4, (1.0, 0.5))),
        ("Embed", lambda b, x: b.add(x, b.embed("other", 10, 4))),
    ],
)
def test_what_needs_every_row_comes_before_rows_are_selected(kind, add):
    b = Builder()
    x = add(b, b.select_rows(write(b, b.embed("table", 10, 4), layer=0)))
    with pytest.raises(ValueError, match=rf"3 \({kind}\) needs every row: it comes before Select"):
        b.sample(b.linear(x, "head", 10), KVGroup(2, 1, 4), 8)


def test_the_head_reads_selected_rows_and_the_body_every_row():
    b = Builder()
    x = b.embed("table", 10, 4)
    total = b.add(b.select_rows(x), x)
    with pytest.raises(ValueError, match=r"2 \(Add\) cannot read 'table', which has every row"):
        closed(b, total)
    b = Builder()
    x = b.select_rows(b.select_rows(b.embed("table", 10, 4)))
    with pytest.raises(ValueError, match=r"2 \(SelectRows\) cannot read .* has selected rows"):
        closed(b, x)


@pytest.mark.parametrize("rewrite", [fuse, lambda program: program], ids=["fused", "plain"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_rows_without_logits_end_with_the_last_attention(architecture, rewrite):
    program = rewrite(network(architecture))
    assert isinstance(program.body[-1], Attention)
    assert [type(op) for op in program.head[:3]] == [SelectRows, SelectRows, Linear]
    assert program.head[2].weights == ("layers.6.o",)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_last_layers_products_are_paid_by_rows_of_logits_alone(architecture):
    program = network(architecture)
    products = [op for op in program.operations if isinstance(op, Linear)]
    stems = ("o", "gate", "up", "down")
    wanted = [op for op in products if op.out in [f"layers.6.{stem}" for stem in stems]]
    assert len(wanted) == 4

    def spent(logit_rows):
        return program.flops([Chunk(50, 50)], logit_rows)

    each = spent(1) - spent(0)
    assert each == spent(50) - spent(49)
    assert each > sum(op.flops(1) for op in [*wanted, products[-1]])


@pytest.mark.parametrize("architecture", FAMILIES)
def test_body_and_head_are_the_program(architecture):
    program = network(architecture)
    assert program.body + program.head == program.operations
    assert isinstance(program.head[0], SelectRows)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_flops_are_twice_the_weights_in_products(architecture):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8000}
    program = network(architecture, **sizes)
    products = [op for op in program.operations if isinstance(op, Linear)]
    matrices = sum(p.size for op in products for p in op.parameters if len(p.shape) == 2)
    assert program.flops_per_token(0) == pytest.approx(2 * matrices, rel=0.01)


def test_keys_and_values_take_what_their_shape_says():
    program = network()  # 7 layers, 2 KV heads of 16
    assert program.kv_bytes_per_token(2.0) == 7 * 2 * 2 * 16 * 2
    assert program.kv_bytes_per_token(4.0) == 7 * 2 * 2 * 16 * 4


def test_step_reads_weights_once_and_pages_per_chunk():
    program, sizes = network(), ElementSizes(kv=2.0)
    alone = program.traffic([Chunk(1, 50)], 1, sizes)
    both = program.traffic([Chunk(1, 50), Chunk(1, 50)], 2, sizes)
    assert both.kv_read == 2 * alone.kv_read
    assert both.activations == 2 * alone.activations
    assert both.weights == alone.weights + 64 * 4  # one more row of the embedding
    assert alone.kv_written == program.kv_bytes_per_token(2.0)


def test_digest_tells_programs_apart():
    assert network().digest == network().digest
    assert network().digest != network(rms_norm_eps=1e-5).digest
    assert network().digest != network(max_position_embeddings=2048).digest


def test_builder_shares_a_tied_parameter():
    program = network(tie_word_embeddings=True)
    assert "lm_head" not in program.parameters
    assert program.parameters["embedding"] == (300, 64)
    assert isinstance(program, Program)
