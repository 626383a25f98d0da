"""Shared by tests, benchmark, profile and tools: workloads, comparison, timing."""
