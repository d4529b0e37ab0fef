"""What runs in each of vLLM's workers: reading rows into the encoder cache, the model without its tower."""
