"""URL items: what may be fetched, and the fetching of it."""
