"""Accounts for the speed of a training loop that others wrote, in their process and without changing its losses."""
