"""Structured outputs through the engine: valid, complete, in step, and refused by name."""

import json
import re
import subprocess
import sys

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import constraints as constraints_module
from octavo.engine import grammar as grammar_module
from octavo.engine.grammar import MAX_GRAMMAR_CHARS
from octavo.errors import BadRequestError, InvalidParameterError
from octavo.request import Reasoning, StructuredOutputs
from octavo.weights.fetch import cached_path
from tests.engines import TINY, assert_idle, drain, drawn, tiny, tokens

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["value", "next"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    LIST,
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"const": "x"}], "items": False},
    {"enum": ["red", "green", 3, None, {"deep": [1]}]},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 6},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]+$", "maxLength": 12},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "integer", "exclusiveMinimum": 3, "maximum": 90, "multipleOf": 5},
    {"type": "number", "minimum": -0.5, "maximum": 0.5},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}, {"required": ["a"]}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ]
    },
    {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "maxProperties": 2},
    {
        "$ref": "#/$defs/pair",
        "$defs": {"pair": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 2},
                  "n": {"type": "integer"}},
    },
    {
        "type": "object",
        "properties": {"a": {"items": {"type": "null"}}, "b": {"$ref": "#/properties/a/items"}},
        "required": ["b"],
    },
]  # fmt: skip


def spec(schema=None, **fields):
    return StructuredOutputs(json=schema, **fields)


def structured(constraint, max_tokens=150, **params):
    """Parameters that draw at random, so that a grammar has something to forbid."""
    fields = {"temperature": 1.0, "seed": 1, "max_tokens": max_tokens, **params}
    return SamplingParams(structured_outputs=constraint, **fields)


def answers(llm, constraint, max_tokens=150, prompt=None, **params):
    params = structured(constraint, max_tokens, **params)
    (output,) = llm.generate(prompt or tokens(5), params, use_tqdm=False)
    return output.outputs


def refusal(constraint):
    with tiny() as llm, pytest.raises(BadRequestError) as caught:
        answers(llm, constraint)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- valid --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_every_complete_output_is_valid_under_its_schema(schema, name):
    num_complete = 0
    with tiny(name) as llm:
        for seed in range(4):
            (answer,) = answers(llm, spec(schema), seed=seed)
            if answer.finish_reason == "stop" or answer.is_ending_forced:
                num_complete += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
        assert_idle(llm.engine)
    assert num_complete >= 2


@pytest.mark.parametrize(
    ("constraint", "is_valid"),
    [
        (spec(choice=["yes", 'a "b" \\ é']), {"yes", 'a "b" \\ é'}.__contains__),
        (spec(regex=r"\d{3}-[xyz]+"), re.compile(r"[0-9]{3}-[xyz]+").fullmatch),
        (spec(regex=r"^(\|.*)$"), re.compile(r"\|.*").fullmatch),
        (spec(grammar='root ::= "a" b\nb ::= [0-9]+'), re.compile(r"a[0-9]+").fullmatch),
        (spec(grammar='start: "(" start ")" | "x"'), re.compile(r"\(*x\)*").fullmatch),
        (spec(json_object=True), lambda text: isinstance(json.loads(text), dict)),
        (spec(json.dumps(PERSON)), json.loads),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)  # fmt: skip
def test_output_is_of_the_kind_that_was_asked_for(constraint, is_valid):
    with tiny() as llm:
        (answer,) = answers(llm, constraint, 40)
    assert is_valid(answer.text)


@pytest.mark.case("V25", "S04")
@pytest.mark.parametrize("seed", range(3))
def test_whitespace_between_tokens_of_json_is_bounded(seed):
    blanks = {i: 100.0 for i, text in enumerate(token_texts()) if text in (" ", "\n")}
    with tiny() as llm:
        (answer,) = answers(llm, spec(PERSON), seed=seed, logit_bias=blanks)
        (compact,) = answers(
            llm, spec(PERSON, disable_any_whitespace=True), seed=seed, logit_bias=blanks
        )
    outside = re.sub(r'"[^"]*"', '""', answer.text)
    assert max(map(len, re.findall(r"\s+", outside))) == 2
    assert answer.finish_reason in ("stop", "length")
    assert not re.search(r"\s", re.sub(r'"[^"]*"', '""', compact.text))


def token_texts():
    with tiny() as llm:
        return [llm.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in range(296)]


@pytest.mark.case("V28")
def test_output_ends_with_its_document_though_no_end_token_was_drawn():
    with tiny() as llm:
        end = dict.fromkeys(llm.tokenizer.eos_ids, -100.0)
        (answer,) = answers(llm, spec(PERSON), logit_bias=end)
        (ignoring,) = answers(llm, spec(PERSON), ignore_eos=True)
    assert answer.finish_reason == ignoring.finish_reason == "stop"
    assert not set(answer.token_ids) & set(end)
    json.loads(answer.text)


def test_end_token_is_drawn_only_where_the_output_is_complete():
    with tiny() as llm:
        end = dict.fromkeys(llm.tokenizer.eos_ids, 100.0)
        (answer,) = answers(llm, spec(regex="[ab]{3,9}"), logit_bias=end)
    assert (answer.finish_reason, len(answer.text)) == ("stop", 3)


@pytest.mark.case("S02")
def test_long_bounds_of_length_compile():
    deep = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5000}}}
    schema = {"type": "object", "properties": {"o": deep}, "required": ["o"]}
    with tiny() as llm:
        (answer,) = answers(llm, spec(schema))
    assert "o" in json.loads(answer.text)


# --- the limit of tokens ------------------------------------------------------------------------


@pytest.mark.case("V30")
def test_output_too_short_for_any_ending_says_length():
    with tiny() as llm:
        (answer,) = answers(llm, spec(PERSON), 5)
    assert (answer.finish_reason, answer.is_ending_forced) == ("length", False)
    assert len(answer.token_ids) == 5


@pytest.mark.parametrize("max_tokens", [32, 40, 60, 90])
@pytest.mark.parametrize("seed", range(3))
def test_near_its_limit_an_output_is_ended_validly_and_flagged(max_tokens, seed):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    with tiny() as llm:
        (answer,) = answers(llm, spec(schema), max_tokens, seed=seed)
    assert len(answer.token_ids) <= max_tokens
    jsonschema.validate(json.loads(answer.text), schema)
    assert (answer.finish_reason == "length") == answer.is_ending_forced


def fewest_tokens(tokenizer, text):
    """The length of the shortest sequence of tokens that spells a text."""
    known = {tokenizer.token_bytes(i) for i in range(256)}
    known |= {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    content, least = text.encode(), [0]
    for end in range(1, len(content) + 1):
        starts = (start for start in range(end) if content[start:end] in known)
        least.append(1 + min(least[start] for start in starts))
    return least[-1]


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        (spec({"enum": ["a long text of many tokens", "brief", 12345, "c"]}), ['"c"']),
        (spec(choice=["the first of them", "second", "third one", "no"]), ["no"]),
        (spec({"anyOf": [PERSON, {"type": "null"}]}), ["null"]),
        (spec({"anyOf": [{"const": "xxxxxxxxxx"}, {"const": "xxxxxy"}]}), ['"xxxxxy"']),
        (spec(regex="(long words|a{7}|b{3})!"), ["bbb!"]),
        (spec(LIST, disable_any_whitespace=True), ['{"value":0,"next":null}']),
        (
            spec({"type": "array", "items": {"enum": ["three", "1", 2]}, "minItems": 2}),
            ["[2,2]", "[2, 2]"],
        ),
    ],
)
def test_an_ending_is_the_shortest_where_choices_are_few(constraint, texts):
    with tiny() as llm:
        ending = llm.engine._constraints._compiler.compile(constraint, None).result().ending
        found = b"".join(map(llm.tokenizer.token_bytes, ending)).decode()
        assert len(ending) == min(fewest_tokens(llm.tokenizer, text) for text in texts), found


@pytest.mark.parametrize("max_tokens", range(3, 30, 3))
def test_an_ending_never_takes_more_tokens_than_are_left(max_tokens):
    schema = {"anyOf": [{"type": "array", "items": {"enum": ["three", 1]}}, PERSON]}
    with tiny() as llm:
        (answer,) = answers(llm, spec(schema), max_tokens, logit_bias=favour(llm, "[,"))
    assert len(answer.token_ids) <= max_tokens
    if answer.is_ending_forced or answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), schema)
    else:
        assert len(answer.token_ids) == max_tokens


@pytest.mark.parametrize("seed", range(4))
def test_room_is_kept_for_an_item_that_has_just_begun(seed):
    item = {"type": "object", "properties": {"long_name": {"type": "integer"}, "other": {}}}
    item["required"] = ["long_name", "other"]
    schema = {"type": "array", "items": item, "minItems": 1}
    with tiny() as llm:
        (answer,) = answers(llm, spec(schema), 150, seed=seed, logit_bias=favour(llm, ",{"))
    assert answer.is_ending_forced
    jsonschema.validate(json.loads(answer.text), schema)


def favour(llm, characters):
    return {llm.tokenizer.encode(c, add_bos=False)[-1]: 20.0 for c in characters}


# --- reasoning ----------------------------------------------------------------------------------


@pytest.mark.case("S06")
@pytest.mark.parametrize("is_open", [True, False])
def test_grammar_begins_after_the_reasoning(is_open):
    with tiny() as llm:
        letters = favour(llm, "<")
        reasoning = Reasoning(is_open=is_open)
        (answer,) = answers(llm, spec(PERSON), 120, reasoning=reasoning, logit_bias=letters)
    thought, end, document = answer.text.rpartition("</think>")
    assert end
    assert thought.startswith("<think>") != is_open
    jsonschema.validate(json.loads(document), PERSON)


# --- the law ------------------------------------------------------------------------------------


def subjects():
    kinds = [spec(PERSON), spec(LIST), spec(regex="([a-f]{2} ){3,20}"), None]
    return [(tokens(20 + 9 * i, i), structured(kinds[i % 4], 60, seed=i)) for i in range(8)]


@pytest.mark.case("S07")
def test_tokens_are_the_same_alone_batched_preempted_and_on_a_warm_prefix():
    with tiny(num_gpu_blocks_override=400) as llm:
        alone = [llm.generate(*job, use_tqdm=False)[0].outputs[0] for job in subjects()]
        warm = [llm.generate(*job, use_tqdm=False)[0].outputs[0] for job in subjects()]
    prompts, params = zip(*subjects(), strict=True)
    with tiny(num_gpu_blocks_override=14, block_size=16) as llm:
        crowded = [o.outputs[0] for o in llm.generate(list(prompts), list(params), use_tqdm=False)]
        assert llm.stats().num_preemptions > 0
        assert_idle(llm.engine)
    assert [a.token_ids for a in alone] == [a.token_ids for a in warm]
    assert [a.token_ids for a in alone] == [a.token_ids for a in crowded]
    assert [a.finish_reason for a in alone] == [a.finish_reason for a in crowded]


@pytest.mark.case("S08")
def test_samples_of_one_prompt_have_a_place_in_the_grammar_each():
    with tiny() as llm:
        found = answers(llm, spec(PERSON), n=4)
    for answer in found:
        jsonschema.validate(json.loads(answer.text), PERSON)
    assert len({answer.text for answer in found}) == 4


def test_whitelist_beside_a_grammar_gives_way_to_it():
    with tiny() as llm:
        (answer,) = answers(llm, spec(choice=["abc"]), allowed_token_ids=[7])
    assert answer.text == "abc"


# --- beside the loop ----------------------------------------------------------------------------


def slow(llm, gate):
    """Make every compilation wait for `gate`."""
    compile_now = llm.engine._constraints._compiler._compile

    def compile_later(*args):
        assert gate.wait(30)
        return compile_now(*args)

    llm.engine._constraints._compiler._compile = compile_later


def test_others_run_while_a_grammar_is_compiled():
    import threading

    gate = threading.Event()
    with tiny() as llm:
        slow(llm, gate)
        engine = llm.engine
        waiting = engine.add(tokens(4), structured(spec(PERSON)), request_id="waiting")
        engine.add(tokens(4), drawn(6), request_id="other")
        deltas = [delta for _ in range(8) for delta in engine.step()]
        assert [d.request_id for d in deltas] == ["other"] * 6
        assert engine.stats().waiting == {"grammar": 1}
        gate.set()
        assert {d.request_id for d in drain(engine)} == {waiting.request_id}
        assert_idle(engine)


@pytest.mark.parametrize("ending", ["abort", "close"])
def test_request_can_be_ended_while_its_grammar_is_compiled(ending):
    import threading

    gate = threading.Event()
    with tiny() as llm:
        slow(llm, gate)
        engine = llm.engine
        engine.add(tokens(4), structured(spec(PERSON), n=2), request_id="a")
        engine.step()
        engine.abort("a") if ending == "abort" else engine.close()
        deltas = drain(engine) if ending == "abort" else engine._pending
        assert [d.finish_reason for d in deltas] == ["abort", "abort"]
        assert deltas[-1].is_last
        gate.set()


@pytest.mark.case("V26")
def test_grammar_that_takes_too_long_is_refused(monkeypatch):
    import threading

    gate = threading.Event()
    monkeypatch.setattr(constraints_module, "COMPILE_SECONDS", 0)
    with tiny() as llm:
        slow(llm, gate)
        with pytest.raises(BadRequestError, match="not compiled within"):
            answers(llm, spec(PERSON))
        assert_idle(llm.engine)
        gate.set()


@pytest.mark.parametrize("value", [100_001, 9_999_991, 1e300, -(10**30), 0.1234567])
def test_multiple_of_much_is_refused_at_once(value):
    with tiny() as llm, pytest.raises(BadRequestError, match=r"multipleOf is .* at most 100,000"):
        answers(llm, spec({"type": "number", "multipleOf": value}))


@pytest.mark.parametrize("value", [0.01, 7, 2.5])
def test_multiple_of_little_is_taken(value):
    with tiny() as llm:
        answers(llm, spec({"type": "number", "multipleOf": value}))


def test_grammar_that_joins_many_expressions_is_refused_at_once():
    joined = "start: A\nA: " + " & ".join(f"/(.*{c}.{{9}}.*)?/" for c in "abcdefghij" * 5)
    texts = "start: " + " ".join('"&"' for _ in range(16))
    schema = 'start: %json {"enum": ["' + "&" * 50 + '"]}'
    with tiny() as llm:
        with pytest.raises(BadRequestError, match="& 49 times, schemas aside; it may have it 16"):
            answers(llm, StructuredOutputs(grammar=joined))
        answers(llm, StructuredOutputs(grammar=texts))
        answers(llm, StructuredOutputs(grammar=schema))


def test_compilation_that_nobody_waits_for_any_more_is_not_begun(monkeypatch):
    import threading

    begun, gate, compiled = threading.Semaphore(0), threading.Event(), []
    with tiny() as llm:
        compiler = llm.engine._constraints._compiler
        compile_now = compiler._compile

        def compile_later(spec, reasoning):
            begun.release()
            assert gate.wait(30)
            compiled.append(spec)
            return compile_now(spec, reasoning)

        compiler._compile = compile_later
        specs = [StructuredOutputs(choice=[text]) for text in "abcd"]
        running = [compiler.compile(each, None) for each in specs[:2]]
        for _ in running:
            assert begun.acquire(timeout=30)
        patient = compiler.compile(specs[2], None)
        monkeypatch.setattr(grammar_module, "COMPILE_SECONDS", 0)
        late = compiler.compile(specs[3], None)
        gate.set()
        assert isinstance(late.exception(30), BadRequestError)
        assert [each.exception(30) for each in (*running, patient)] == [None] * 3
        assert specs[3] not in compiled
        monkeypatch.undo()
        again = compiler.compile(specs[3], None)
        assert again.exception(30) is None, "it may be asked for again"


def test_late_mask_holds_up_its_own_sequence_alone(monkeypatch):
    import threading

    from octavo.engine.matching import GrammarMatcher

    gate, advance = threading.Event(), GrammarMatcher.advance

    def advance_later(matcher, token):
        assert gate.wait(30)
        return advance(matcher, token)

    monkeypatch.setattr(GrammarMatcher, "advance", advance_later)
    with tiny() as llm:
        engine = llm.engine
        engine.add(tokens(4), structured(spec(PERSON)), request_id="late")
        while not engine.scheduler.waiting:  # until its grammar is compiled
            engine._settle_grammars()
        engine.add(tokens(4), drawn(9), request_id="other")
        deltas = [delta for _ in range(12) for delta in engine.step()]
        assert [d.request_id for d in deltas].count("other") == 9
        assert [d.request_id for d in deltas].count("late") == 1
        gate.set()
        text = "".join(d.text for d in [*deltas, *drain(engine)] if d.request_id == "late")
        jsonschema.validate(json.loads(text), PERSON)
        assert_idle(engine)


def test_compiled_grammar_is_kept_for_the_next_request():
    with tiny() as llm:
        compiler = llm.engine._constraints._compiler
        first = compiler.compile(spec(PERSON), None)
        assert compiler.compile(spec(dict(PERSON)), None) is first
        assert compiler.compile(spec(PERSON, disable_any_whitespace=True), None) is not first
        broken = compiler.compile(spec(regex="["), None)
        assert isinstance(broken.exception(), BadRequestError)
        assert compiler.compile(spec(regex="["), None) is not broken


# --- refused ------------------------------------------------------------------------------------


def nested(keyword, depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema, {"type": "object", "properties": {"a": schema}}]}
    return schema


@pytest.mark.case("V26")
@pytest.mark.parametrize(
    "constraint",
    [
        spec(nested("oneOf", 12)),
        spec(nested("anyOf", 16)),
        spec({"allOf": [{"properties": {"q": {"pattern": f".*{i}x.*"}}} for i in range(60)]}),
        spec({"$ref": "#"}),
        spec(regex="["),
        spec('{"type": "string"'),
        spec("[" * 100_000),
        spec({"enum": ["x" * 300_000]}),
        spec(grammar="start: foo"),
        spec(grammar="root ::= ("),
        spec(regex="a" * 300_000),
        spec(regex=".*" * 9_000),
        spec(grammar="start: T\nT: " + "A? " * 9_000 + "\nA: /a/"),
        spec(grammar='start: %json {"pattern": "' + "a?" * 9_000 + '"}'),
        spec(grammar='start: %json {"patternProperties": {"' + "a?" * 9_000 + '": true}}'),
        spec(grammar="start: %json " + "[" * 5_000),
        spec(grammar='start: "a"\n// ' + "x" * 300_000),
        spec({"anyOf": [{"type": "string", "pattern": "a?" * 4_500}] * 2}),
    ],
    ids=range(18),
)
def test_hostile_constraint_is_refused_and_the_engine_goes_on(constraint):
    with tiny() as llm:
        with pytest.raises(BadRequestError):
            answers(llm, constraint)
        assert answers(llm, spec(choice=["ok"]))[0].text == "ok"
        assert_idle(llm.engine)


@pytest.mark.case("V26")
@pytest.mark.parametrize("regex", ["(a{1,1000}){1,1000}", "(x+x+)+y", "(((a{1,90}){1,90}){1,90})+"])
def test_hostile_expression_costs_no_more_than_its_tokens(regex):
    with tiny() as llm:
        assert len(answers(llm, spec(regex=regex), 20)[0].token_ids) <= 20


def test_schemas_in_a_grammar_do_not_count_as_its_text():
    schema = json.dumps({"enum": ["x" * 30_000, "y"]})
    assert len(schema) > MAX_GRAMMAR_CHARS
    with tiny() as llm:
        (answer,) = answers(
            llm, spec(grammar=f"start: %json {schema}"), logit_bias=favour(llm, "y")
        )
    assert answer.text in ('"y"', '"' + "x" * 100)


def chained(kind):
    """A constraint with as long a chain of references as its limits allow."""
    if kind == "rules":
        rules = (f"r{i}:r{i + 1}" for i in range(1_300))
        return {"grammar": "\n".join(["start: r0", *rules, 'r1300: "a"'])}
    wrap = {"lists": lambda ref: {"type": "array", "items": ref, "minItems": 1}}
    number = {"references": 6_500, "lists": 3_000}[kind]
    links = {f"d{i}": wrap.get(kind, dict)({"$ref": f"#/$defs/d{i + 1}"}) for i in range(number)}
    return {"json": {"$ref": "#/$defs/d0", "$defs": {**links, f"d{number}": {"type": "null"}}}}


@pytest.mark.parametrize("kind", ["rules", "references", "lists"])
def test_long_chain_of_references_does_not_end_the_process(kind):
    """In a process of its own: a thread whose stack is used up takes its process along."""
    program = """
import json, sys
from octavo import LLM, SamplingParams
from octavo.request import StructuredOutputs
constraint = StructuredOutputs(**json.load(sys.stdin))
with LLM(sys.argv[1], num_gpu_blocks_override=8) as llm:
    params = SamplingParams(max_tokens=9, structured_outputs=constraint)
    print(len(llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids))
"""
    command = [sys.executable, "-c", program, str(TINY / "llama")]
    done = subprocess.run(
        command, input=json.dumps(chained(kind)), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) <= 9


@pytest.mark.case("S01")
def test_pattern_that_cannot_be_enforced_is_refused_with_its_place():
    schema = {"type": "object", "properties": {"p": {"type": "string", "pattern": "^(?=a)b"}}}
    line = refusal(spec(schema))
    assert line.startswith("json.properties.p.pattern:")
    assert "look-ahead" in line


@pytest.mark.case("S03")
def test_reference_out_of_the_schema_is_refused():
    assert "json.properties.a.$ref" in refusal(
        spec({"properties": {"a": {"$ref": "https://example.org/schema"}}})
    )


def test_alternatives_that_overlap_are_refused_with_their_place():
    overlapping = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]}
    line = refusal(spec({"type": "object", "properties": {"a": {"items": overlapping}}}))
    assert line.startswith("json.properties.a.items: oneOf")


def test_prompt_in_a_list_that_is_refused_leaves_the_others():
    with tiny() as llm:
        params = [structured(spec(regex="[")), structured(spec(choice=["fine"]))]
        refused, fine = llm.generate([tokens(3), tokens(3)], params, use_tqdm=False)
    assert isinstance(refused.error, BadRequestError)
    assert fine.outputs[0].text == "fine"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"json": {}, "regex": "a"},
        {"regex": 3},
        {"choice": []},
        {"choice": "abc"},
        {"choice": [""]},
        {"json": 4},
        {"json_object": "yes"},
    ],
)
def test_constraint_that_is_not_exactly_one_is_an_error(fields):
    with pytest.raises(InvalidParameterError):
        StructuredOutputs(**fields)


def test_parameters_take_a_constraint_and_nothing_else():
    with pytest.raises(InvalidParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs={"json": {}})
    with pytest.raises(InvalidParameterError, match="reasoning"):
        SamplingParams(reasoning="<think>")


# --- the real model -----------------------------------------------------------------------------


@pytest.mark.real
def test_the_default_model_writes_a_document_of_a_schema():
    if cached_path("smollm2-135m") is None:
        pytest.skip("smollm2-135m has not been fetched; `octavo pull` does it")
    with LLM("smollm2-135m", max_model_len=512) as llm:
        messages = [{"role": "user", "content": "Describe a person named John as JSON."}]
        for schema in (PERSON, {"type": "object"}):
            params = structured(spec(schema), 200, temperature=0)
            (output,) = llm.chat(messages, params, use_tqdm=False)
            jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert "John" in output.outputs[0].text
