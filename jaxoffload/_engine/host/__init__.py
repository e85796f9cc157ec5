"""The pinned host pool: its size, what a program needs of it, and copies that nothing hides."""
