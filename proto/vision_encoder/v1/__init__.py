"""vision_encoder.v1: generated from encoder.proto by ``make proto``."""
