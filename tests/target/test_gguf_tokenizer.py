"""The tokenizer of a converted GGUF file has the original's ids, or the file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import TargetSection
from pipeline.errors import TargetError
from pipeline.target.open import open_template, resolve

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tests.target.gguf_files import USER_DEFINED, byte_level, sentencepiece, write_model

TEXTS = [
    "x\n\n1. y  22 333 4444 12345 It's WE'LL HelloWorld camelCase ÄÖÜ über 东京 2024年 a/b//c",
    "\n\n\n  indented\t\ttabs   !!??\n hello there   my friend 100,000.50 can't DON'T  9 \r\n z",
    "a  1",
    " hi",
    "  hi",
    "½ ²²² ٣٤٥ e\u0301 ☃",
]
CHAT = "<|im_start|>user\nhello 12<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _byte_level(split: Any, *, whole: bool = False, special: tuple[str, ...] = ()) -> Any:
    """A tokenizer as a model's own tokenizer.json describes it, trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|im_start|>", "<|im_end|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Trained on cuts of GPT-2's, so that there are merges for another cut to show.
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("|", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    trained.train_from_iterator([text[at:] for text in TEXTS for at in range(9)], trainer)
    tree = json.loads(tokenizer.to_str())
    learned = json.loads(trained.to_str())
    tree["model"] |= {name: learned["model"][name] for name in ("vocab", "merges")}
    tree["added_tokens"] = learned["added_tokens"]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(tree)), eos_token="<|im_end|>"
    )


def _with_digits() -> Any:
    """As SmolLM2's, StarCoder's and Command R's tokenizer.json have it."""
    from tokenizers import pre_tokenizers

    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _gpt2() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _qwen2() -> Any:
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    return Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer.pre_tokenizer


def _split_of_transformers(name: str) -> Callable[[], Any]:
    def split() -> Any:
        from tokenizers import Regex, pre_tokenizers

        mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
        expression = Regex(mapping.GGUF_PRE_TOKENIZER_SPLITS[name])
        parts: list[Any] = [pre_tokenizers.Split(expression, behavior="isolated")]
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(parts)

    return split


_PRE: dict[str, tuple[Callable[[], Any], bool]] = {
    "gpt-2": (_gpt2, False),
    "olmo": (_gpt2, False),
    "command-r": (_with_digits, False),
    "starcoder": (_with_digits, False),
    "exaone": (_with_digits, False),
    "qwen2": (_qwen2, False),
    "deepseek-r1-qwen": (_qwen2, False),
    "stablelm2": (_qwen2, False),
    "llama-bpe": (_split_of_transformers("llama-bpe"), True),
    "smaug-bpe": (_split_of_transformers("llama-bpe"), False),
    "glm4": (_split_of_transformers("llama-bpe"), False),
    "tekken": (_split_of_transformers("tekken"), True),
    "gpt-4o": (_split_of_transformers("gpt-4o"), False),
    "qwen35": (_split_of_transformers("qwen35"), False),
}


def _converted(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve(TargetSection(source=str(path))).directory)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("pre", _PRE)
def test_each_pre_tokenizer_has_the_original_s_ids(tmp_path: Path, pre: str) -> None:
    split, whole = _PRE[pre]
    original = _byte_level(split(), whole=whole)
    converted = _converted(write_model(tmp_path / "m.gguf", byte_level(original, pre)))
    for text in [*TEXTS, CHAT]:
        assert _ids(converted, text) == _ids(original, text), text


def test_smollm2_s_stays_as_transformers_converts_it(tmp_path: Path) -> None:
    """What its runs and heads were made with, though its own cuts digits out first."""
    original = _byte_level(_gpt2())
    converted = _converted(write_model(tmp_path / "m.gguf", byte_level(original, "smollm")))
    assert _ids(converted, "a  1\n\n2") == _ids(original, "a  1\n\n2")
    assert _ids(converted, "a  1\n\n2") != _ids(_byte_level(_with_digits()), "a  1\n\n2")


@pytest.mark.parametrize("pre", ["deepseek-llm", "falcon", "default", "of-tomorrow", None])
def test_a_pre_tokenizer_that_is_not_known_is_refused(tmp_path: Path, pre: str | None) -> None:
    path = write_model(tmp_path / "m.gguf", byte_level(_byte_level(_gpt2()), pre))
    named = rf"tokenizer\.ggml\.pre={pre} splits text" if pre else r"has no tokenizer\.ggml\.pre"
    with pytest.raises(TargetError, match=rf"{named}.*\(fix: use the model's safetensors"):
        resolve(TargetSection(source=str(path)))
    assert not list((tmp_path / "cache").rglob("config.json")), "no cache entry remains"


_REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "white space": (
        lambda w: w.add_remove_extra_whitespaces(True),
        r"remove_extra_whitespaces=True is not applied",
    ),
    "prefix": (lambda w: w.add_add_space_prefix(True), r"add_space_prefix=True is not applied"),
    "a key of tomorrow": (
        lambda w: w.add_bool("tokenizer.ggml.normalizer.lowercase", True),
        r"tokenizer\.ggml\.normalizer\.lowercase is not known here",
    ),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_a_setting_that_is_not_applied_is_refused(tmp_path: Path, name: str) -> None:
    change, message = _REFUSED[name]
    vocabulary = byte_level(_byte_level(_gpt2()), "gpt-2")
    path = write_model(tmp_path / "m.gguf", vocabulary, change=change)
    with pytest.raises(TargetError, match=message):
        resolve(TargetSection(source=str(path)))


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    def unigram(writer: Any) -> int:
        writer.add_tokenizer_model("t5")
        writer.add_token_list(["<pad>", "</s>", "<unk>", "a"])
        writer.add_token_scores([0.0] * 4)
        writer.add_eos_token_id(1)
        return 4

    path = write_model(tmp_path / "m.gguf", unigram)
    with pytest.raises(TargetError, match=r"tokenizer\.ggml\.model=t5 is not known here"):
        resolve(TargetSection(source=str(path)))


def test_no_token_is_made_up(tmp_path: Path) -> None:
    """transformers adds GPT-2's <|endoftext|>, for which there is no row of the embedding."""
    original = _byte_level(_gpt2())
    converted = _converted(write_model(tmp_path / "m.gguf", byte_level(original, "gpt-2")))
    assert len(converted) == len(original)
    text = "a <|endoftext|> b"
    assert _ids(converted, text) == _ids(original, text)


def test_added_tokens_that_are_not_ascii_stand_for_themselves(tmp_path: Path) -> None:
    original = _byte_level(_gpt2(), special=("<«User»>", "<think>"))
    kinds = {"<think>": USER_DEFINED}
    vocabulary = byte_level(original, "gpt-2", types=kinds)
    converted = _converted(write_model(tmp_path / "m.gguf", vocabulary))
    text = "<«User»> x <think>1"
    assert _ids(converted, text) == _ids(original, text)
    assert converted.decode(_ids(converted, text), skip_special_tokens=True) == " x <think>1"


def _sentencepiece(*, prefix: bool) -> Any:
    """Llama 2's own: a normaliser puts the space, at the beginning of each piece of a text."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spelled = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spelled] if prefix else spelled
    )
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    own = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*own, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    texts = ["hello there my friend", "[INST] hi [/INST] ok", "x y z  1 2 3"]
    words = [word for text in texts for word in text.replace(" ", " |").split("|")]
    tokenizer.train_from_iterator(words, trainer)
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = [each for each in tree["added_tokens"] if each["content"] in own]
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(tree)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


_TURNS = [
    "<s>[INST] hi [/INST] ok</s><s>[INST] hello  there [/INST]",
    "hi</s>\nhello ☃",
    " hi",
    "  x",
]


@pytest.mark.parametrize("prefix", [True, False, None])
def test_a_sentencepiece_file_has_the_original_s_ids(tmp_path: Path, prefix: bool | None) -> None:
    original = _sentencepiece(prefix=prefix is not False)
    vocabulary = sentencepiece(original, prefix=prefix)
    converted = _converted(write_model(tmp_path / "m.gguf", vocabulary))
    for text in _TURNS:
        ids = _ids(original, text)
        assert _ids(converted, text) == ids, text
        assert converted.decode(ids) == original.decode(ids)


def test_phi_3_s_special_tokens_take_the_white_space_after_them(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    original = _sentencepiece(prefix=True)
    original.add_tokens([AddedToken("</s>", rstrip=True, normalized=False, special=True)])
    fused: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("attn_q.weight", "attn_k.weight", "attn_v.weight", "ffn_gate.weight"), ()
    )
    fused |= {"attn_qkv.weight": (64, 32), "ffn_up.weight": (96, 32)}
    path = write_model(
        tmp_path / "m.gguf",
        sentencepiece(original),
        architecture="phi3",
        shapes=fused,
        change=lambda w: w.add_pad_token_id(0),
    )
    converted = _converted(path)
    for text in [*_TURNS, "hi</s>\n</s>  hello<s> hi"]:
        assert _ids(converted, text) == _ids(original, text), text


_WRITES_BOS = "{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}"
_WITHOUT = _WRITES_BOS.removeprefix("{{ bos_token }}")


@pytest.mark.parametrize("template", [_WRITES_BOS, _WITHOUT])
@pytest.mark.parametrize("bos", [True, False, None])
def test_a_chat_begins_with_the_bos_that_its_template_writes(
    tmp_path: Path, template: str, bos: bool | None
) -> None:
    original = _sentencepiece(prefix=True)
    original.chat_template = template
    vocabulary = sentencepiece(original, template=template, bos=bos)
    path = write_model(tmp_path / "m.gguf", vocabulary)
    ours = open_template(TargetSection(source=str(path)))
    chat = [{"role": "user", "content": "hi"}]
    expected = original.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ours.start("hi") == expected
    assert expected.count(original.bos_token_id) == (template is _WRITES_BOS)
    # A text that is no chat: SentencePiece files add it unless they say not to.
    begins = ours.encode("hi", add_special=True)[0] == original.bos_token_id
    assert begins == (bos is not False)


def test_llama_3_s_texts_begin_with_bos_unless_the_file_says_not_to(tmp_path: Path) -> None:
    for stated in (None, False):
        original = _byte_level(_split_of_transformers("llama-bpe")())
        vocabulary = byte_level(original, "llama-bpe", bos="<|im_start|>")

        def change(writer: Any, stated: bool | None = stated) -> None:
            if stated is not None:
                writer.add_add_bos_token(stated)

        path = write_model(tmp_path / f"{stated}.gguf", vocabulary, change=change)
        first = _converted(path)("a")["input_ids"][0]
        assert (first == original.convert_tokens_to_ids("<|im_start|>")) == (stated is None)
