"""Example models and a training program that use jaxoffload as any user would."""

import importlib.util

_EXTRA = ("flax", "grain", "omegaconf", "optax", "orbax", "pyarrow", "tokenizers", "tqdm")  # what `train` installs

if _missing := [name for name in _EXTRA if importlib.util.find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"models needs {', '.join(_missing)}: pip install '.[train,cuda13]', or '.[train]' without NVIDIA GPUs",
        name=__name__,  # where this package itself is missing, Python and jaxoffload print a line and no traceback
    )
