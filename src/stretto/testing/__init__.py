"""Conformance suites and fault injection, for our own tests and for those of users."""
