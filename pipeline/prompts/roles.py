"""Who speaks in a message, by the names that chat data sets use, in any capitals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["user", "assistant", "system", "tool"]

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "model", "bot", "chatbot", "ai"), "assistant"),
    **dict.fromkeys(("chatgpt", "bing", "bard", "claude", "gemini"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call", "tool_calls"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
}


def kind_of(role: str) -> Kind | None:
    """None for a role that has no known name."""
    name = role.strip().lower().replace("-", "_").replace(" ", "_")
    return "assistant" if name.startswith("gpt") else _KINDS.get(name)


def is_exchange(value: Any) -> bool:
    """Whether it is {"human": "…", "assistant": "…"}: roles as keys, the user's among them."""
    if not isinstance(value, Mapping):
        return False
    texts = {key: text for key, text in value.items() if text is not None}
    kinds = [kind_of(key) if isinstance(key, str) else None for key in texts]
    distinct = len(set(kinds)) == len(kinds)
    all_text = all(isinstance(text, str) for text in texts.values())
    return {"user", "assistant"} <= set(kinds) and None not in kinds and distinct and all_text


def messages_of(exchange: Mapping[str, Any]) -> list[dict[str, str]]:
    """An exchange's messages, in the order in which they are said."""
    said: dict[Kind | None, str] = {kind_of(key): key for key, text in exchange.items() if text}
    order: tuple[Kind, ...] = ("system", "user", "tool", "assistant")
    return [{"role": kind, "content": exchange[said[kind]]} for kind in order if kind in said]
