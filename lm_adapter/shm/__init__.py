"""Rows in the encoder's memory on the same host: attach to its arenas, map them, read the directory, copy
rows.

``broker`` speaks to the encoder's broker, ``mapping`` and ``device`` map memory read-only, ``reader`` finds
and copies rows, ``attachment`` keeps a client attached for as long as its encoder lives."""
