"""The version of the states format, for those who need no torch to know it."""

from __future__ import annotations

#: Raised with every change that an older reader would misread; docs/states-format.md describes this one.
FORMAT = 2
