"""Allocations that need no search: where a search starts, and what it has to beat."""
