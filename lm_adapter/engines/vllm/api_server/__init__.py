"""What runs in vLLM's API server, or in an offline ``LLM``: media, processors, the first ``Prefetch``."""
