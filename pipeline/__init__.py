"""EAGLE-3 draft heads, from prompts to a measured speedup.

prompts ─[synth]→ samples ─[features]→ states ─[train]→ head ─[eval]→ report
"""

import os

__version__ = "0.1.0"

# A thread that waits for the others spins first, 300,000 turns by GNU OpenMP's default. Where
# another process has its core, that is time which those others lack (docs/log.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # read when torch is imported
