"""Deciding what an engine computes next. Pure: plain data in, plain data out, no clock of its own."""
