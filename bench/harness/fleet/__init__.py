"""Encoders behind a real Envoy, callers that compare every row, and events that hit them under load."""
