"""States on storage: the one door to their format, which docs/states-format.md specifies.

sample.py      one sample in memory, and its checksum
encodings.py   bf16, fp8 and int8 rows
layout.py      the version, the file's tensors, its header and what must hold between them
writer.py      samples to bytes
reader.py      bytes to samples, one at a time
"""

from __future__ import annotations

from pipeline.store.states.encodings import Codec, Encoding
from pipeline.store.states.reader import StatesReader
from pipeline.store.states.sample import StatesSample, teacher_positions
from pipeline.store.states.writer import encode_states

__all__ = [
    "Codec",
    "Encoding",
    "StatesReader",
    "StatesSample",
    "encode_states",
    "teacher_positions",
]
