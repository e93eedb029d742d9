"""Stores, which keep bytes under names: a folder, memory, a bucket. This package knows no tensors, ranks or formats."""
