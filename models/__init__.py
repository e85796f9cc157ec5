"""Example models and a training program that use jaxoffload as any user would."""
