"""Prompts to replies: conversations, and the backends that generate for them.

conversations.py  one conversation, turn by turn; the scheduler of many in flight
backend.py        what the scheduler expects of a backend
local.py          the bundled decoder as a backend
remote.py         servers as a backend: requests, retries, health checks, the endpoint pool
servers.py        what vLLM, SGLang and OpenAI-compatible servers are sent; the exact ids of replies
"""
