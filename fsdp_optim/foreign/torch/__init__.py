"""Plain torch files and folders of them: which part is the model and which the optimizer (roles.py), reading and writing."""
