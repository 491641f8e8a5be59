"""Prompts to replies: conversations, and who answers them.

conversations.py  turns of many conversations in flight at once
local.py          the bundled decoder answers
remote.py         servers answer: sessions, retries, checks
endpoints.py      the endpoint pool: who is alive, who is busy
servers.py        what vLLM, SGLang and OpenAI-compatible servers are sent and send back
token_ids.py      the exact ids of a server's reply
"""
