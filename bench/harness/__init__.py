"""Pods, engine servers, fleets and their callers, as benches and tests start them. Imports no tests."""
