"""`pdmesh doctor`: what is wrong with this machine or the mesh, and what to do about it."""
