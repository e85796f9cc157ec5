"""Reference models and the training program, which use jaxoffload as any user would."""
