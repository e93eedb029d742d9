"""What the public functions do, one file per verb, each joining a model, an optimizer, a plan and a transport."""
