"""Processes that wait with their imports done."""
