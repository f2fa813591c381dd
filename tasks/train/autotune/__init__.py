"""Chooses the executions that `auto` leaves open by timing them."""
