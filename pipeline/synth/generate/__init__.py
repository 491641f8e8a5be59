"""Prompts to replies: conversations, and the backends that generate for them.

conversations.py  one conversation, turn by turn: what it asks, how it ends, the sample it becomes
scheduler.py      turns of many conversations in flight at once
backend.py        what the scheduler asks of a backend
local.py          the bundled decoder as a backend
remote.py         servers as a backend: sessions, retries, health checks
endpoints.py      the endpoint pool: which are healthy, which are busy
client.py         one HTTP request: a reply, or one of three ways to fail
servers.py        what vLLM, SGLang and OpenAI-compatible servers are sent and send back
token_ids.py      the exact ids of a server's reply
rejections.py     how many prompts servers may cost
"""
