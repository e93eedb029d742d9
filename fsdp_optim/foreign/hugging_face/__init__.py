"""Folders of Hugging Face, and plain safetensors files of any origin: weights, in one file or several with an index."""
