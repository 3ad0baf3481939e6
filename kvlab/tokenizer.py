"""Text to token ids and back: a thin shell around the `tokenizers` library, with chat templates and streaming.

Byte-level BPE works on UTF-8 bytes, so one character may be spread over several tokens (an emoji is often three). A
stream must hold back the first ones until the character is complete: StreamDecoder does. Loads no torch.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

REPLACEMENT = "\ufffd"  # what UTF-8 decoding puts where the bytes of a character are not complete


class Tokenizer:
    """Encodes and decodes text, and lays out chats.

    backend:       a tokenizers.Tokenizer.
    bos_token_id, eos_token_id, pad_token_id: int or None.
    stop_ids:      ids that end a generation: eos and, where the model has them, end of turn and end of text.
    chat_template: Jinja source, or None for a model that was not trained on chats.
    """

    def __init__(
        self, backend, bos_token_id=None, eos_token_id=None, pad_token_id=None, stop_ids=(), chat_template=None
    ):
        self.backend = backend
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id
        self.stop_ids = tuple(dict.fromkeys([*([] if eos_token_id is None else [eos_token_id]), *stop_ids]))
        self.chat_template = chat_template

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`. add_special_tokens puts a begin-of-text token in front where the model wants one."""
        if not isinstance(text, str):
            raise TypeError(f"encode takes one str, not {type(text).__name__}")
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids, skip_special_tokens: bool = False) -> str:
        """The text of `ids`: a list of ints or a 1-d tensor. Bytes that are no complete character become U+FFFD."""
        ids = self._ids(ids)
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, id: int) -> str:
        """The text of one token, for labels in figures; half a character shows as U+FFFD."""
        return self.decode([id])

    def apply_chat_template(self, messages, add_generation_prompt: bool = False, tokenize: bool = True):
        """`messages`, dicts with "role" and "content", laid out as the model was trained: ids, or text if not tokenize.

        add_generation_prompt ends with the opening of the assistant's turn. The template comes with the checkpoint, so
        it runs in Jinja's sandbox. Follows the method of the same name in Hugging Face's transformers.
        """
        if self.chat_template is None:
            raise ValueError(
                "this tokenizer has no chat template: its model was not trained on chats; pass a prompt as str"
            )
        text = _render(
            self.chat_template,
            messages=_messages(messages),
            add_generation_prompt=add_generation_prompt,
            bos_token=self._text(self.bos_token_id),
            eos_token=self._text(self.eos_token_id),
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def chat(self, messages) -> list[int]:
        """Ids that ask for the assistant's next turn; a str counts as one message of the user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.apply_chat_template(messages, add_generation_prompt=True)

    def save(self, folder) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which transformers and Tokenizer.from_folder read."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        ids = {"bos_token": self.bos_token_id, "eos_token": self.eos_token_id, "pad_token": self.pad_token_id}
        config = {name: self._text(id) for name, id in ids.items() if id is not None}
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    @classmethod
    def from_folder(cls, folder, stop_ids=()) -> Tokenizer:
        """From tokenizer.json, with tokenizer_config.json and chat_template.jinja where they are there."""
        from tokenizers import Tokenizer as Backend

        folder = Path(folder)
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer ({error})") from None
        config = {}
        if (folder / "tokenizer_config.json").exists():
            try:
                config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            except ValueError as error:
                raise ValueError(f"{folder / 'tokenizer_config.json'} is not JSON ({error})") from None

        def id_of(name):
            token = config.get(name)
            token = token["content"] if isinstance(token, dict) else token
            return None if token is None else backend.token_to_id(token)

        template = config.get("chat_template")
        if isinstance(template, list):  # several named ones; "default" is the plain chat
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (folder / "chat_template.jinja").exists():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(backend, id_of("bos_token"), id_of("eos_token"), id_of("pad_token"), stop_ids, template)

    @classmethod
    def from_gguf(cls, metadata: dict) -> Tokenizer:
        """From a GGUF file's metadata. Knows SmolLM's byte-level BPE; ValueError names any other kind.

        SmolLM splits every digit off before GPT-2's split into words (llama.cpp's pre-tokenizer "smollm").
        """
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(
                f"the GGUF file's tokenizer is {kind[0]!r} with pre-tokenizer {kind[1]!r}; kvlab reads SmolLM's"
            )
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        backend = Backend(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        backend.decoder = decoders.ByteLevel()
        control = 3  # GGUF's token type for tokens that stand for no text
        special = [token for token, type in zip(tokens, types, strict=True) if type == control]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
        ids = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding"))
        stops = [tokens.index(token) for token in ("<|im_end|>", "<|endoftext|>") if token in special]
        return cls(backend, *ids, stop_ids=stops, chat_template=metadata.get("tokenizer.chat_template"))

    def _text(self, id):
        return "" if id is None else self.backend.id_to_token(id)

    def _ids(self, ids) -> list[int]:
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        for id in ids:
            if not isinstance(id, int):
                raise TypeError(f"decode takes one sequence of int ids, not one of {type(id).__name__}")
            if not 0 <= id < self.vocab_size:
                raise ValueError(f"token id {id} is outside the vocabulary of {self.vocab_size}")
        return ids


class StreamDecoder:
    """Decodes a stream token by token: push(id) returns the text that became certain, flush() what was held back.

    All pieces joined equal decode(all ids). A piece is "" while a character lacks bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip = tokenizer, skip_special_tokens
        self._context: list[int] = []  # ids that are out; the last piece is enough to know if a space comes next
        self._held: list[int] = []  # ids that are not

    def push(self, id: int) -> str:
        self._held.append(id)
        return self._release(final=False)

    def flush(self) -> str:
        return self._release(final=True)

    def _release(self, final: bool) -> str:
        before = self.tokenizer.decode(self._context, self.skip)
        text = self.tokenizer.decode(self._context + self._held, self.skip)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        piece = text[len(before) :]
        self._context = self._held if piece else self._context + self._held
        self._held = []
        return piece


def _messages(messages) -> list[dict]:
    if isinstance(messages, str) or not isinstance(messages, list | tuple) or not messages:
        raise TypeError(
            'messages must be a list such as [{"role": "user", "content": "Hello"}], not ' + repr(messages)[:60]
        )
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TypeError(f'a message is a dict with str "role" and "content", not {repr(message)[:60]}')
    return list(messages)


def _render(template: str, **values) -> str:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):  # templates call this for an order of roles that they do not allow
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(template).render(**values)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from None
