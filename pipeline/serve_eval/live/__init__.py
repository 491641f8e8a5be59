"""Running servers: the evaluation's prompts as token ids, and what the server says of its rounds.

client     HTTP and server-sent events, retries, what can go wrong
servers    what SGLang, vLLM and `eagle3 serve` offer, under old and new names
measure    a closed loop at each concurrency
findings   what differs from the decoder's own report
golden     τ on a few prompts of a report, and the check of a server against it
stage      the commands
"""
