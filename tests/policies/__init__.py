"""Custom policies: where they come from, what guards the cores from them, and that they decide."""
