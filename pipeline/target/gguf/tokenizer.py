"""The tokenizer that a GGUF file describes, where transformers' conversion makes another one of it.

    tokenizer.ggml.model   gpt2 (byte-level BPE) or llama (SentencePiece)
    tokenizer.ggml.pre     how a byte-level one splits text before merges: a name for an expression
    add_space_prefix       whether SentencePiece puts a space before a text, and after each special
                           token, as llama.cpp does
    token_type             control and user-defined tokens stand for themselves in a text

What the names of `pre` mean is llama.cpp's: it is what wrote the file and what serves it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn, Protocol

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)


def _cased(suffix: str) -> str:
    """Words cut where upper case follows lower case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}"


_LLAMA3 = rf"(?i:{_CONTRACTIONS})|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"(?i:{_CONTRACTIONS})|{_WORD}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_REST_WITH_SLASH}"
_GPT4O = rf"{_cased(f'(?i:{_CONTRACTIONS})?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
#: GPT-2's own expression, which tokenizers has built in, alone or after single digits are cut out.
_GPT2, _DIGITS = "gpt2", "digits"

_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1"), _LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), _GPT2),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("minerva-7b", "mellum2"), _DIGITS),
    # Its digits are cut out first as well, which changes the tokens of white space before a digit.
    # Runs, heads and figures exist for SmolLM2 as transformers converts it: it is left at that.
    "smollm": _GPT2,
}
#: Those that take a whole piece that is a token before they look at merges.
_WHOLE_PIECES = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
}
#: Architectures whose SentencePiece tokenizers transformers has classes of its own for.
_GEMMA = ("gemma", "gemma2", "gemma3")
#: Keys that say nothing of how text becomes tokens, beside the ids of special tokens.
_SILENT = {
    *("ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores", "ggml.token_type", "ggml.merges"),
    *("ggml.add_bos_token", "ggml.add_eos_token", "ggml.add_sep_token", "ggml.add_space_prefix"),
    *("ggml.token_type_count", "chat_template", "chat_templates", "huggingface.json"),
}


class TokenizerFacts(Protocol):
    """Of a GGUF file, as much as is read here."""

    architecture: str
    tokenizer: dict[str, Any]

    def refuse(self, problem: str) -> NoReturn: ...


def apply_tokenizer(gguf: TokenizerFacts, directory: Path) -> None:
    """Correct the `tokenizer.json` in `directory` where the file says something else."""
    path = directory / "tokenizer.json"
    tree = json.loads(path.read_text(encoding="utf-8"))
    before = json.dumps(tree)
    _correct_added(gguf, tree)
    for part, value in _expected(gguf, tree).items():
        owner, _, field = part.rpartition(".")
        (tree[owner] if owner else tree)[field] = value
    if json.dumps(tree) != before:
        path.write_text(json.dumps(tree, ensure_ascii=False, indent=2), encoding="utf-8")


def check_tokenizer(gguf: TokenizerFacts, tokenizer: Any) -> None:
    """Raise TargetError where a loaded tokenizer is not what `apply_tokenizer` wrote."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    for part, value in _expected(gguf, tree).items():
        owner, _, field = part.rpartition(".")
        if (tree[owner] if owner else tree).get(field) != value:
            gguf.refuse(f"the {field} of the converted tokenizer is not the file's")
    tokens, added = gguf.tokenizer.get("ggml.tokens") or [], tokenizer.added_tokens_decoder
    if surplus := sorted(each for each in added if each >= len(tokens)):
        gguf.refuse(f"has {len(tokens)} tokens, transformers adds {added[surplus[0]].content!r}")
    for at, token, kind in _standing(gguf):
        if at not in added and not (token.isspace() and gguf.architecture in _GEMMA):
            gguf.refuse(f"token {at}, {token!r}, is of type {kind} and cut into pieces in a text")
    first = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if first != (bos := adds_bos(gguf)):
        gguf.refuse(f"tokenizer.ggml.add_bos_token={bos}, the converted tokenizer has {first}")


def adds_bos(gguf: TokenizerFacts) -> bool:
    """Whether a text that is no chat begins with the beginning-of-text token."""
    model, pre = gguf.tokenizer.get("ggml.model"), gguf.tokenizer.get("ggml.pre")
    default = model == "llama" or pre in _WHOLE_PIECES
    stated = bool(gguf.tokenizer.get("ggml.add_bos_token", default))
    return stated and "ggml.bos_token_id" in gguf.tokenizer


def check_keys(gguf: TokenizerFacts) -> None:
    """Raise TargetError for a kind of tokenizer, or a setting of one, that is not known here."""
    keys = gguf.tokenizer
    model, pre = keys.get("ggml.model"), keys.get("ggml.pre")
    if model not in ("gpt2", "llama"):
        gguf.refuse(f"tokenizer.ggml.model={model} is not known here, gpt2 and llama are")
    if model == "gpt2" and pre is None:
        gguf.refuse("has no tokenizer.ggml.pre, which says how text is split")
    if model == "gpt2" and pre not in _SPLITS:
        gguf.refuse(f"tokenizer.ggml.pre={pre} splits text in a way that is not known here")
    if model == "gpt2" and keys.get("ggml.add_space_prefix"):
        gguf.refuse("tokenizer.ggml.add_space_prefix=True is not applied to byte-level tokens")
    if keys.get("ggml.remove_extra_whitespaces"):
        gguf.refuse("tokenizer.ggml.remove_extra_whitespaces=True is not applied")
    known = _SILENT | {"ggml.remove_extra_whitespaces"}
    for name in keys:
        if name not in known and not name.endswith("_token_id") and "chat_template." not in name:
            gguf.refuse(f"tokenizer.{name} is not known here, and may change the tokens")


def _expected(gguf: TokenizerFacts, tree: dict[str, Any]) -> dict[str, Any]:
    """Parts of tokenizer.json, and what the file says of them."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    whole: Any = Tokenizer(models.BPE())
    pre = gguf.tokenizer.get("ggml.pre")
    if gguf.tokenizer.get("ggml.model") == "gpt2":
        parts: list[Any] = []
        split = _SPLITS[str(pre)]
        if split in (_GPT2, _DIGITS):
            if split == _DIGITS:
                parts.append(pre_tokenizers.Digits(individual_digits=True))
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
        else:
            parts.append(pre_tokenizers.Split(Regex(split), behavior="isolated"))
            parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        one = len(parts) == 1
        whole.pre_tokenizer = parts[0] if one else pre_tokenizers.Sequence(parts)
        split_as = json.loads(whole.to_str())["pre_tokenizer"]
        # The normaliser is that of transformers' class for the family: a file has none.
        return {"pre_tokenizer": split_as, "model.ignore_merges": pre in _WHOLE_PIECES}
    if gguf.architecture in _GEMMA:
        return {}
    spelled = normalizers.Replace(" ", "▁")
    prefix = bool(gguf.tokenizer.get("ggml.add_space_prefix", True))
    steps = [normalizers.Prepend("▁"), spelled] if prefix else [spelled]
    whole.normalizer = normalizers.Sequence(steps)
    normalizer = json.loads(whole.to_str())["normalizer"]
    decoders = [each for each in tree["decoder"]["decoders"] if each["type"] != "Strip"]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoder = {**tree["decoder"], "decoders": decoders + strip}
    return {"normalizer": normalizer, "pre_tokenizer": None, "decoder": decoder}


def _correct_added(gguf: TokenizerFacts, tree: dict[str, Any]) -> None:
    """The file's control and user-defined tokens stand for themselves, and no others are made up.

    transformers adds special tokens of its own, whose ids no row of the embedding has, and spells
    those of the file in bytes where they are not ASCII.
    """
    from tokenizers import AddedToken, pre_tokenizers

    tokens, vocabulary = gguf.tokenizer.get("ggml.tokens") or [], tree["model"]["vocab"]
    added = {each["id"]: each for each in tree["added_tokens"] if each["id"] < len(tokens)}
    byte_level = gguf.tokenizer.get("ggml.model") == "gpt2"
    for at, token, kind in _standing(gguf):
        if at in added or (gguf.architecture in _GEMMA and not byte_level):
            continue
        if token not in vocabulary and byte_level:
            spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            pieces = spelled.pre_tokenize_str(token)
            vocabulary.pop("".join(piece for piece, _ in pieces), None)
            vocabulary[token] = at
        whole: Any = AddedToken(token, normalized=False, special=kind == "control")
        added[at] = {"id": at, **_fields(whole)}
    if gguf.architecture == "phi3" and not byte_level:
        for each in added.values():  # of which a file says nothing
            each["rstrip"] = each["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    tree["added_tokens"] = [added[at] for at in sorted(added)]


def _fields(token: Any) -> dict[str, Any]:
    names = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def _standing(gguf: TokenizerFacts) -> list[tuple[int, str, str]]:
    """Id, text and kind of the tokens that are never cut into pieces."""
    kinds = {_CONTROL: "control", _USER_DEFINED: "user-defined"}
    tokens = gguf.tokenizer.get("ggml.tokens") or []
    types = gguf.tokenizer.get("ggml.token_type") or []
    pairs = enumerate(zip(tokens, types, strict=False))
    return [(at, token, kinds[kind]) for at, (token, kind) in pairs if kind in kinds]
