"""Running servers: the evaluation's prompts as token ids, and the rounds that a server reports.

client     HTTP and server-sent events, retries, what can go wrong
kinds      what SGLang, vLLM and `eagle3 serve` offer, under old and new names
load       a closed loop at each concurrency
findings   what differs from the decoder's own report
evaluate   `eagle3 eval --server`
check      `eagle3 check-serving`: the golden prompts of a report
"""
