"""Where bytes are kept under names: a folder, memory, a bucket. Nothing here knows a tensor, a rank or a format."""
