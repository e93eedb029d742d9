"""One value of optimizer state: its kind, its summary without elements, equality bit for bit, and what cannot be gathered."""
