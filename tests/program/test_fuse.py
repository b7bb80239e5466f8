import pytest

from octavo.program.fuse import fuse
from octavo.program.ops import (
    Add,
    AddRMSNorm,
    Attention,
    ElementSizes,
    GatedActivation,
    Linear,
    RMSNorm,
    Rope,
    Split,
    Value,
    WriteKV,
)
from octavo.program.program import Builder, Chunk, KVGroup
from tests.program.networks import FAMILIES, network

STEP = [Chunk(1, 90), Chunk(33, 33)]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fused_program_has_the_same_flops_and_parameters(architecture):
    plain = network(architecture)
    fused = fuse(plain)
    assert fused.flops(STEP, 2) == plain.flops(STEP, 2)
    assert fused.parameters == plain.parameters
    assert fused.kv_groups == plain.kv_groups


@pytest.mark.parametrize("architecture", FAMILIES)
def test_fused_program_moves_fewer_activations_and_the_same_weights(architecture):
    plain, sizes = network(architecture), ElementSizes()
    before, after = plain.traffic(STEP, 2, sizes), fuse(plain).traffic(STEP, 2, sizes)
    assert after.activations < before.activations
    assert after._replace(activations=0) == before._replace(activations=0)


def test_one_product_makes_queries_keys_and_values():
    products = [op for op in fuse(network()).operations if isinstance(op, Linear)]
    stems = [tuple(name.split(".")[-1] for name in op.weights) for op in products[:4]]
    assert stems == [("q", "k", "v"), ("o",), ("gate", "up"), ("down",)]
    assert products[0].out_widths == (64, 32, 32)


def test_biases_stay_with_their_weights():
    first = next(
        op for op in fuse(network("Qwen2ForCausalLM")).operations if isinstance(op, Linear)
    )
    assert first.biases == tuple(f"{weight}_bias" for weight in first.weights)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_sums_are_folded_into_products_or_into_norms(architecture):
    """Gemma normalises what it adds, so its sums go to the next norm."""
    kinds = [type(op) for op in fuse(network(architecture)).operations]
    normalised = 2 * 7 if architecture == "Gemma3ForCausalLM" else 0
    assert kinds.count(AddRMSNorm) == normalised
    assert Add not in kinds
    assert GatedActivation not in kinds


def test_a_layer_is_eight_operations_beside_its_split():
    layer = [type(op) for op in fuse(network()).operations[1:10]]
    assert layer == [RMSNorm, Linear, Split, Rope, Rope, WriteKV, Attention, Linear, RMSNorm]


def test_products_end_with_what_is_done_to_their_columns():
    products = [op for op in fuse(network()).operations if isinstance(op, Linear)]
    assert [(op.gate, op.addend) for op in products[:4]] == [
        (None, None),
        (None, "embedding"),
        ("silu", None),
        (None, "layers.0.o.sum"),
    ]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_values_that_are_left_keep_their_names_and_widths(architecture):
    def values(program):
        return {value for op in program.operations for value in op.outputs}

    plain, fused = network(architecture), fuse(network(architecture))
    joint = {op.x for op in fused.operations if isinstance(op, Split)}
    assert {value.name for value in values(fused) - values(plain)} == joint


def builder_of_sum(y_reads: int) -> tuple[Builder, Value]:
    """x plus a product of x, which so many others read too."""
    b = Builder()
    x = b.embed("table", 10, 4)
    y = b.linear(x, "y", 4)
    total = b.add(x, y)
    for n in range(y_reads):
        total = b.add(total, b.norm(y, f"other{n}", 1e-6))
    return b, total


@pytest.mark.parametrize("reads", [0, 1])
def test_a_product_that_others_read_too_stays_a_value(reads):
    b, total = builder_of_sum(reads)
    program = b.sample(b.linear(b.select_rows(total), "head", 10), KVGroup(1, 1, 4), max_context=8)
    addends = [op.addend for op in fuse(program).operations if isinstance(op, Linear)]
    assert addends == ([None, None] if reads else ["table", None])


def test_a_product_added_to_itself_is_left_alone():
    b = Builder()
    y = b.linear(b.embed("table", 10, 4), "y", 4)
    head = b.linear(b.select_rows(b.add(y, y)), "head", 10)
    program = b.sample(head, KVGroup(1, 1, 4), max_context=8)
    assert fuse(program) == program


@pytest.mark.parametrize("is_read", [False, True])
def test_a_gate_that_others_read_too_stays_a_value(is_read):
    b = Builder()
    x = b.embed("table", 10, 4)
    gate, up = b.linear(x, "gate", 6), b.linear(x, "up", 6)
    out = b.gated(gate, up, "silu")
    if is_read:
        out = b.add(out, b.norm(gate, "other", 1e-6))
    head = b.linear(b.select_rows(out), "head", 10)
    program = b.sample(head, KVGroup(1, 1, 4), max_context=8)
    kinds = [type(op) for op in fuse(program).operations]
    assert (GatedActivation in kinds) == is_read


def test_halves_gated_the_other_way_round_are_left_alone():
    b = Builder()
    x = b.embed("table", 10, 4)
    up, gate = b.linear(x, "up", 6), b.linear(x, "gate", 6)
    head = b.linear(b.select_rows(b.gated(gate, up, "silu")), "head", 10)
    program = b.sample(head, KVGroup(1, 1, 4), max_context=8)
    assert GatedActivation in [type(op) for op in fuse(program).operations]


def test_norm_of_another_value_is_left_alone():
    b = Builder()
    x = b.embed("table", 10, 4)
    y = b.norm(x, "first", 1e-6)
    total = b.add(x, y)
    z = b.norm(y, "second", 1e-6)
    program = b.sample(
        b.linear(b.select_rows(b.add(total, z)), "head", 10), KVGroup(1, 1, 4), max_context=8
    )
    assert fuse(program) == program


def test_fusing_twice_changes_nothing_more():
    fused = fuse(network("Gemma3ForCausalLM"))
    assert fuse(fused) == fused
