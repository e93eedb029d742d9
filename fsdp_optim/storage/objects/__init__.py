"""Stores whose files are objects under keys: no folders, no rename, no writing into an object that exists."""
