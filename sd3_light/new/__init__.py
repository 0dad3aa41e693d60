"""New projects."""
