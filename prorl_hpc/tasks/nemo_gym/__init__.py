"""Tasks whose rows are NeMo Gym's and whose rewards come from a Gym resources server."""
