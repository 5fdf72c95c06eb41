"""Old scripts unchanged: the modules that they import, made of ours.

::

    import fp16core.compat

    fp16core.compat.install("apex")  # or "megatron", or both
    from apex.fp16_utils import FP16_Optimizer

or, without a line in the script, ``python -m fp16core.compat SCRIPT ARGS...``.

Nothing that is installed is ever shadowed: our modules are found only where Python
finds no others. A real apex keeps all it has; today's has no ``fp16_utils`` any more,
and only that part of it is ours then. A package ``fp16`` or ``megatron`` that lies
beside a script is the script's own, and wins likewise.
"""

from fp16core.compat._finder import FAMILIES, install, provided, uninstall

__all__ = ["FAMILIES", "install", "provided", "uninstall"]
