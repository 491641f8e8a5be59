"""Head + decoder → acceptance, speed, losslessness, and the report people read."""
