"""Running servers: the evaluation's prompts as token ids, and the rounds that a server reports.

client.py    HTTP and server-sent events, retries, what can go wrong
kinds.py     what SGLang, vLLM and `eagle3 serve` offer, under old and new names
load.py      a closed loop at each concurrency
findings.py  what differs from the decoder's own report
evaluate.py  `eagle3 eval --server`
check.py     `eagle3 check-serving`: the golden prompts of a report
"""
