"""Access to rows in the encoder's memory on the same host: attach, map, find, copy."""
