"""What runs in vLLM's scheduler: which requests wait for which rows. Rows never come here."""
