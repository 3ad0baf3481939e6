"""The tokenizer: SmolLM2's ids against transformers', streaming, chat templates, folders, bad input."""

import json
import random
import re

import pytest

from kvlab.checkpoint import CheckpointError
from kvlab.gguf_file import GGUFFile
from kvlab.pretrained import smollm2_file
from kvlab.tokenizer import StreamDecoder, Tokenizer


@pytest.fixture(scope="module")
def gguf():
    try:
        return smollm2_file()
    except CheckpointError as error:
        pytest.skip(f"SmolLM2's file cannot be had: {error}")


@pytest.fixture(scope="module")
def tokenizer(gguf):
    return Tokenizer.from_gguf(GGUFFile(gguf).metadata)


PIECES = [
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "It's, we're, they'll, I'd, he's, CAN'T, l'été",
    "def f(x):\n    return x ** 2  # square\n",
    "for i in range(10):\n\tprint(f'{i:>3}')\n",
    "std::vector<int> v = {1, 2, 3};\n\n\n\nint main() { return v[0] == 0x1F ? 1 : -1; }",
    "SELECT name, COUNT(*) FROM t WHERE id >= 42 GROUP BY 1;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b\\n"}}',
    "🙂",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb",
    "emoji in 🙂 the 🎉 middle",
    "你好，世界。今天天气很好！",
    "日本語とカタカナ、ひらがな",
    "한국어 문장입니다",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم ٣٤٥",
    "नमस्ते दुनिया १२३",
    "עברית",
    "Ünïcödé, naïve café, Zürich, e\u0301 (combining)",
    "1234567890",
    "3.14159, 1,000,000 and 2024-02-30",
    "  12  345",
    "\n\n7\n\n\n8",
    "x½ Ⅷ² ①②③",
    "    four spaces   three  two one ",
    "\ttab\t\ttabs\r\nwindows\r\n\r\n",
    " \n \n\t \n",
    "a\u00a0b\u2003c\u200bd",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|endoftext|>after the end<file_sep>x.py<jupyter_code>1 + 1<empty_output>",
    "<|im_start|><|im_start|> <|im_end|>not special: <|im_strat|> <im_end>",
    "https://example.org/a/b?c=d&e=%20#f",
    "$x_{i+1} = \\frac{1}{2}\\left(x_i + \\frac{a}{x_i}\\right)$",
    "ALLCAPS camelCase snake_case kebab-case SCREAMING_SNAKE",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---***///\\\\|||",
    "\ufffd\u0000\x7f\x1b[31mred",
]


def varied_texts(n=200):
    rng = random.Random(0)
    texts = ["", " ", *PIECES]
    while len(texts) < n - 20:
        texts.append(rng.choice(["", " ", "\n", "  ", "\n\n"]).join(rng.sample(PIECES, rng.randint(2, 5))))
    while len(texts) < n:  # any code point, so that bytes without a merge come up
        chars = (chr(rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x1F300, 0x1FA00)])) for _ in range(40))
        texts.append("".join(chars))
    return texts


@pytest.fixture(scope="module")
def reference(gguf):
    """transformers' tokenizer, converted by transformers from the same file; only its first split is replaced.

    transformers 5 gives a GGUF file of pre-tokenizer "smollm" GPT-2's split alone. SmolLM2 splits every digit off
    first (llama.cpp: the pattern \\p{N}, then GPT-2's; the model's own tokenizer.json: Digits, then ByteLevel). The two
    differ where several blanks precede a digit: "  12" is [two blanks, 1, 2] for SmolLM2 and [blank, blank, 1, 2]
    without the digit rule; and at digits that are not ASCII, whose first byte may merge with the blank before them.
    The reference is given llama.cpp's two patterns, which share no code with Digits.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Regex, pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    plain = tokenizer.backend_tokenizer.pre_tokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer, plain


def test_same_ids_as_transformers_on_200_texts(tokenizer, reference):
    texts = varied_texts()
    assert len(texts) == 200
    for text in texts:
        assert tokenizer.encode(text) == reference[0](text)["input_ids"], text
        ids = tokenizer.encode(text)
        for skip in (False, True):
            theirs = reference[0].decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs


def test_same_ids_as_transformers_own_conversion_where_digits_do_not_matter(tokenizer, reference):
    theirs, plain = reference
    split, theirs.backend_tokenizer.pre_tokenizer = theirs.backend_tokenizer.pre_tokenizer, plain
    try:
        far = re.compile(r"\s\s\d")
        texts = [t for t in varied_texts() if not far.search(t) and all(c.isascii() or not c.isnumeric() for c in t)]
        assert len(texts) > 50
        for text in texts:
            assert tokenizer.encode(text) == theirs(text)["input_ids"], text
    finally:
        theirs.backend_tokenizer.pre_tokenizer = split


CHATS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": "Answer in 中文 🙂."}, {"role": "user", "content": " Hi \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b <|im_end|>"},
        {"role": "user", "content": "{{ messages }} {% raw %}"},
    ],
]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("messages", CHATS)
def test_chat_template_as_in_transformers(tokenizer, reference, messages, prompt):
    theirs = reference[0].apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False) == theirs
    ids = reference[0](theirs, add_special_tokens=False)["input_ids"]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=prompt) == ids
    if prompt:
        assert tokenizer.chat(messages) == ids


def test_text_survives_the_round_trip(tokenizer):
    for text in varied_texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_stream_never_shows_half_a_character(tokenizer):
    for text in varied_texts():
        decoder, pieces = StreamDecoder(tokenizer, skip_special_tokens=False), []
        for id in tokenizer.encode(text):
            pieces.append(decoder.push(id))
            assert pieces[-1].count("\ufffd") <= text.count("\ufffd")
        assert "".join(pieces) + decoder.flush() == text


@pytest.mark.parametrize("skip", [False, True])
def test_a_stream_of_any_ids_adds_up_to_decoding_them_at_once(tokenizer, skip):
    rng = random.Random(1)
    for _ in range(200):  # random ids are mostly broken UTF-8 with special tokens in between
        ids = [rng.choice([rng.randrange(20), rng.randrange(300), rng.randrange(49152)]) for _ in range(30)]
        decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
        assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


def test_an_emoji_is_held_back_until_its_last_token(tokenizer):
    ids = tokenizer.encode("🦜")
    assert len(ids) > 1
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(id) for id in ids] == [""] * (len(ids) - 1) + ["🦜"]
    decoder.push(ids[0])
    assert decoder.flush() == "\ufffd"  # a generation that stops inside a character says so


def test_a_stream_keeps_the_spaces_of_sentencepiece():
    """Llama 2's decoder drops the blank of the first token alone: the stream must know that it is past the first."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordLevel({"▁one": 0, "▁two": 1, "<s>": 2, "?": 3}, unk_token="?"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    decoder = StreamDecoder(Tokenizer(backend))
    assert [decoder.push(id) for id in (2, 0, 1, 2, 2, 1, 3)] == ["", "one", " two", "", "", " two", "?"]


def test_special_ids(tokenizer):
    names = [tokenizer.token(id) for id in (tokenizer.bos_token_id, tokenizer.eos_token_id, *tokenizer.stop_ids)]
    assert names == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id and tokenizer.vocab_size == 49152


def test_a_saved_tokenizer_reads_back_and_opens_in_transformers(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path, stop_ids=[0])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "stop_ids", "chat_template"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert all(again.encode(text) == tokenizer.encode(text) for text in PIECES)
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert all(theirs(text)["input_ids"] == tokenizer.encode(text) for text in PIECES)
    assert theirs.eos_token_id == tokenizer.eos_token_id


def test_begin_of_text_and_named_templates_come_from_the_folder(tmp_path):
    """TinyLlama's way: tokenizer.json puts <s> in front; tokens and templates may be objects."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors

    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1, "hi": 2, "user": 3, "?": 4}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    named = [
        {"name": "tools", "template": "x"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].role }} hi"},
    ]
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hi") == [0, 2] and tokenizer.encode("hi", add_special_tokens=False) == [2]
    assert tokenizer.chat("hi") == [0, 3, 2]  # one <s>: the template wrote it
    assert tokenizer.stop_ids == (1,)
    (tmp_path / "chat_template.jinja").write_text("hi")
    assert Tokenizer.from_folder(tmp_path).chat("hi") == [2]


def test_bad_input_is_named(tokenizer, tmp_path):
    with pytest.raises(TypeError, match="not bytes"):
        tokenizer.encode(b"hi")
    with pytest.raises(ValueError, match="49152 is outside the vocabulary of 49152"):
        tokenizer.decode([1, 49152])
    with pytest.raises(TypeError, match="not one of list"):
        tokenizer.decode([[1, 2]])
    with pytest.raises(TypeError, match="messages must be a list"):
        tokenizer.apply_chat_template([])
    with pytest.raises(TypeError, match='"role" and "content"'):
        tokenizer.chat([{"role": "user"}])
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer(tokenizer.backend).chat("hi")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="'llama' with pre-tokenizer None"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "llama"})


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{% if %}", "refuses these messages"),
    ],
)
def test_a_template_runs_in_a_sandbox_and_its_errors_are_one_sentence(tokenizer, template, reason):
    with pytest.raises(ValueError, match=reason):
        Tokenizer(tokenizer.backend, chat_template=template).chat("hi")
