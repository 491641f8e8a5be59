"""Running servers: the evaluation's prompts as token ids, and what the server says of its rounds.

stage.py      `eagle3 eval --server`
check.py      `eagle3 check-serving`
client.py     HTTP and server-sent events, retries, what can go wrong
servers.py    what SGLang, vLLM and `eagle3 serve` offer, under old and new names
measure.py    a closed loop at each concurrency
findings.py   what differs from the decoder's own report
golden.py     τ on a few prompts of a report, and on a server
table.py      what is printed of a server
"""
