"""The wire contract shared by the service and its adapters."""
