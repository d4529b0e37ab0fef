"""The wire contract and the memory layouts shared by the service and its adapter."""
