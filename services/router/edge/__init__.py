"""The HTTP edge: errors, bodies, fields, access; what holds for every API."""
