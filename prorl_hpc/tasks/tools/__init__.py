"""Function calling over simulated worlds, and over the user's own expected calls."""
