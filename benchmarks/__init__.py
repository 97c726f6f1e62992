"""Benchmarks of paged attention decode beside its peers and the read limit."""
