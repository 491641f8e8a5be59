"""EAGLE-3 draft heads, from prompts to a measured speedup.

prompts ─[synth]→ samples ─[features]→ states ─[train]→ head ─[eval]→ report
"""

__version__ = "0.1.0"
