"""Train a small language model under fairscale FSDP, stop it, and resume it at other world sizes: `make demo`."""
