"""`eagle3 serve`: a reference server with OpenAI's API, to try heads with the tools of servers.

start.py     loads target, drafter and tree as `eval` does, listens, ends on SIGTERM; the routes,
             limits, the key
replies.py   what is sent: bodies, server-sent events, usage and acceptance; who has gone
protocol.py  what is asked: strict bodies, names of this server, and what is refused by name
connections.py  how long a connection may wait for its client, and which one makes room
worker.py    the thread that runs the engine's rounds while requests join and leave
text.py      token ids → text piece by piece, and stop strings
metrics.py   /metrics under vLLM's names
"""
