"""Tokenizers of every kind that targets have, trained on a few lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.conftest import QUESTIONS

#: Every token that one of the templates writes.
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>")
LINES = [*QUESTIONS, "It is 4. USER: ASSISTANT: [INST] user assistant system Be kind.\n<|>/"] * 3


def byte_level() -> Any:
    """As Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return wrapped(tokenizer)


def metaspace(scheme: str, **end: bool) -> Any:
    """As Llama 2, Mistral, TinyLlama, Phi-3; `end` are flags of <|end|>."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=[*SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    fields = json.loads(tokenizer.to_str())
    # Byte tokens are no added ones: text never holds them.
    fields["added_tokens"] = [each for each in fields["added_tokens"] if each["content"] in SPECIAL]
    for each in fields["added_tokens"]:
        if each["content"] == "<|end|>":
            each |= end
    return wrapped(Tokenizer.from_str(json.dumps(fields)))


def unigram() -> Any:
    """As Gemma's and T5's ancestors: pieces with scores."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return wrapped(tokenizer)


def llama(*, legacy: bool) -> Any:
    """transformers' own."""
    from transformers import LlamaTokenizer

    model = json.loads(metaspace("first").backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer: Any = LlamaTokenizer(vocab=model["vocab"], merges=merges, legacy=legacy)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(each, normalized=False) for each in SPECIAL[3:]]}
    )
    return tokenizer


def wrapped(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, never": lambda: metaspace("never"),
    "end with rstrip": lambda: metaspace("first", rstrip=True),
    "end with lstrip": lambda: metaspace("always", lstrip=True),
    "end with both": lambda: metaspace("first", lstrip=True, rstrip=True),
    "unigram": unigram,
    "Llama, legacy": lambda: llama(legacy=True),
    "Llama": lambda: llama(legacy=False),
}
