"""Write tokenizers.json beside this file: token ids and prompts by other implementations.

Run where transformers, sentencepiece and gguf are installed:

    python make_tokenizer_goldens.py SMOLLM2.gguf GEMMA3.gguf

Byte-level tokenizers come from transformers' GGUF conversion, SentencePiece ones from the
sentencepiece library itself, prompts from transformers' chat templates.
"""

import io
import json
import random
import sys
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)
from transformers.integrations.gguf.reader import read_gguf_metadata

TEXTS = [
    "",
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t x",
    "\n",
    "\n\n",
    "\n\n\n hello \n",
    " \n \n",
    "Hello world! Café déjà vu — 123 😊",
    "  hello",
    "hello  ",
    "hello   world",
    "don't I'LL we've He'd O'Neill's 'tis",
    "汉字漢字 日本語テキスト 한국어",
    "🌶👩\u200d👩\u200d👧 👨🏽\u200d🚀 🏳️\u200d🌈",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "مرحبا بالعالم",
    "שלום",
    "Ελληνικά Привет мир",
    "e\u0301 vs \u00e9 \u1e9b\u0323",
    "1 22 333 4444 55555 3.14159 1,234,567",
    "x  123",
    "٣٤٥ ½ Ⅷ ²",
    "def f(x):\n    return x**2  # ok\n\tpass\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<bos><start_of_turn>user\nhi<end_of_turn>",
    "a<eos>b <pad>",
    "<0x0A> <0x41>",
    "<table><tr><td>1</td></tr></table>",
    "http://a.b/c?d=e&f=%20g#h",
    '$$\\frac{a}{b}$$ \\n {"k": [1, null]}',
    "ÀÉÎõü ß ẞ İı ŉ",
    "\u200b\u200d\ufeff\u00a0\u3000x",
    "a" * 300,
    "ab" * 150,
    " " * 70 + "x",
    "=" * 100,
    "CamelCaseWORDSandMore fooBAR",
    "▁▁ under ▁score",
    "\x00\x01\x7f",
    "…“quotes”–—!?!?!!",  # noqa: RUF001
    "<unused3>[multimodal]<start_of_image>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 𐍈",  # noqa: RUF001
]
chooser = random.Random(1)
mixed = ""
while len(mixed.encode()) < 10_000:
    mixed += chooser.choice(TEXTS)[:80] + chooser.choice([" ", "\n", "", ". "])
TEXTS.append(mixed)

# What the published tokenizer.json of these kinds has and transformers' conversion leaves out.
DIGITS = {"smollm"}
NFC = {"qwen2", "qwen35"}


def completed(backend, pre):
    """The converted tokenizer with the steps that the conversion leaves out."""
    if pre in DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    return backend


def ids_of(backend, texts):
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def tiny_byte_level(pre):
    """A tokenizer whose merges run across every boundary, so that each wrong cut shows."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.train_from_iterator(
        [text[i : i + 12] for text in TEXTS[:-1] for i in range(0, len(text), 5)] * 2,
        trainers.BpeTrainer(
            vocab_size=700,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"],
            show_progress=False,
        ),
    )
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    types = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    backend, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": pre,
            "tokens": tokens,
            "merges": merges,
            "token_type": types,
        },
    )
    return {
        "metadata": {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.eos_token_id": 2,
        },
        "ids": ids_of(completed(backend, pre), TEXTS[:-1]),
    }


def tiny_sentencepiece(prefix, user_defined):
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXTS[:-1] if text.strip()] * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=user_defined,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    proto = sentencepiece_model_pb2.ModelProto.FromString(out.getvalue())
    spelled = [p.piece.replace("▁", " ") if p.type == 4 else p.piece for p in proto.pieces]
    return {
        "metadata": {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": spelled,
            "tokenizer.ggml.scores": [p.score for p in proto.pieces],
            "tokenizer.ggml.token_type": [p.type for p in proto.pieces],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": prefix,
        },
        "ids": [processor.encode(text) for text in TEXTS[:-1]],
    }


def real_byte_level(path):
    """The whole model through transformers, special tokens parsed."""
    architecture, parts, _ = get_gguf_tokenizer(path)
    backend, _ = convert_gguf_tokenizer(architecture, parts)
    return {
        "parse_special": True,
        "ids": ids_of(completed(backend, parts.get("pre_tokenizer_type")), TEXTS),
    }


def real_sentencepiece(path):
    """The model's pieces put back into a SentencePiece model: text only, no control tokens."""
    keys = ["tokens", "scores", "token_type"]
    metadata, _ = read_gguf_metadata(path, tuple(f"tokenizer.ggml.{key}" for key in keys))
    proto = sentencepiece_model_pb2.ModelProto()
    columns = [metadata[f"tokenizer.ggml.{key}"] for key in keys]
    for token, score, kind in zip(*columns, strict=True):
        piece = token.replace(" ", "▁") if kind == 4 else token
        proto.pieces.add(piece=piece, score=score, type=kind)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    for name in ("pad", "eos", "bos", "unk"):
        identity = columns[0].index(f"<{name}>")
        setattr(trainer, f"{name}_id", identity)
        setattr(trainer, f"{name}_piece", f"<{name}>")
    proto.pieces[trainer.unk_id].type = 2
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.vocab_size = len(proto.pieces)
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(proto.SerializeToString())
    return {"parse_special": False, "ids": [processor.encode(text) for text in TEXTS]}


CHATML = (
    "{% for m in messages %}\n{{ '<|im_start|>' + m.role + '\\n' + m.content | trim }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}\n<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{{ bos_token }}{% if tools %}Tools:\n  {% for t in tools %}\n"
    "{{ t | tojson(indent=2) }}\n"
    "  {% endfor %}{% endif %}{% if documents %}{% for d in documents %}"
    "[{{ d.title }}] {{ d.text }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if style is defined %}{{ style }}{% endif %}"
)
CENTURY = (
    "{% set century = strftime_now('%C') if strftime_now is defined else 'no date' %}"
    "{{ century }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}|{% endfor %}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "user", "content": ' Hi, what is 2<3 & "é"? '},
    {"role": "assistant", "content": "Sure, "},
]
CALLS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "w", "arguments": {"city": "Zürich", "n": 1}}}
        ],
    },
]
TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
CHATS = [
    (CHATML, TALK, {"add_generation_prompt": True}),
    (CHATML, TALK, {"continue_final_message": True}),
    (CHATML, CALLS, {"add_generation_prompt": False}),
    (TOOLS, TALK, {"tools": [TOOL], "documents": [{"title": "t", "text": "x"}]}),
    (TOOLS, TALK, {"continue_final_message": True, "style": "terse"}),
    (CENTURY, TALK, {}),
    (CENTURY, PARTS, {}),
]


def chat_cases(smollm_path):
    shell = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    cases = [
        {
            "template": template,
            "messages": messages,
            "arguments": arguments,
            "prompt": shell.apply_chat_template(
                messages, chat_template=template, tokenize=False, **arguments
            ),
        }
        for template, messages, arguments in CHATS
    ]
    architecture, parts, _ = get_gguf_tokenizer(smollm_path)
    backend, _ = convert_gguf_tokenizer(architecture, parts)
    source = read_gguf_metadata(smollm_path, ())[0]["tokenizer.chat_template"]
    whole = PreTrainedTokenizerFast(tokenizer_object=completed(backend, "smollm"))
    prompt = whole.apply_chat_template(
        TALK, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    ids = whole.apply_chat_template(
        TALK, chat_template=source, add_generation_prompt=True, return_dict=False
    )
    return cases, {"messages": TALK, "prompt": prompt, "ids": ids}


def main():
    smollm, gemma = sys.argv[1:]
    kinds = ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"]
    chats, smollm_chat = chat_cases(smollm)
    goldens = {
        "texts": TEXTS,
        "models": {
            "smollm2-135m": real_byte_level(smollm),
            "gemma3-270m": real_sentencepiece(gemma),
        },
        "tiny": {
            **{pre: tiny_byte_level(pre) for pre in kinds},
            "sentencepiece with a prefix space": tiny_sentencepiece(True, []),
            "sentencepiece without": tiny_sentencepiece(False, ["▁▁", "▁▁▁", "\n\n", "<table>"]),
        },
        "chats": chats,
        "smollm2_chat": smollm_chat,
    }
    target = Path(__file__).with_name("tokenizers.json")
    target.write_text(json.dumps(goldens, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
