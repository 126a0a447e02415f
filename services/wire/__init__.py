"""Protos <-> plain data, per proto package, with bounds on all that comes in.

Nothing behind this border sees a generated message, and nothing unchecked passes it: what is out of
bounds raises InvalidRequestError with the name of the field.
"""
