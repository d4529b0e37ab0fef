"""How bytes travel: channel settings, chunk location in raw messages, rows put together from chunks."""
