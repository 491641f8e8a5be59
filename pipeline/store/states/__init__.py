"""States on storage: the one door to their format, which docs/states-format.md specifies.

states_sample.py   one sample in memory
states_format.py   the version
encodings.py       bf16, fp8 and int8 rows
states_layout.py   the file's tensors, its header and what must hold between them
states_writer.py   samples to bytes
states_reader.py   bytes to samples, one at a time
"""

from __future__ import annotations

from pipeline.store.states.encodings import Codec, Encoding
from pipeline.store.states.format import FORMAT
from pipeline.store.states.reader import Room, StatesReader
from pipeline.store.states.sample import StatesSample, teacher_positions
from pipeline.store.states.writer import encode_states

__all__ = [
    "FORMAT",
    "Codec",
    "Encoding",
    "Room",
    "StatesReader",
    "StatesSample",
    "encode_states",
    "teacher_positions",
]
