"""Mixed-precision training for PyTorch with a C++ core."""

# torch first: the extension links the libraries that torch loads, and knows no
# tensor before torch is there.
import torch as _torch

from fp16core._torch_check import check_torch as _check_torch

_check_torch(_torch.__version__, _torch.version.cuda)

from fp16core import optim  # noqa: E402
from fp16core._build_info import version as __version__  # noqa: E402
from fp16core._core import GradientReport, LossScaleError, StepRecord  # noqa: E402
from fp16core._old_pickles import PickledObject, load_checkpoint  # noqa: E402
from fp16core.buffer_guard import BufferGuard  # noqa: E402
from fp16core.fp16_optimizer import FP16_Optimizer  # noqa: E402
from fp16core.load_report import LoadReport  # noqa: E402
from fp16core.loss_scaler import DynamicLossScaler, LossScaler  # noqa: E402

__all__ = [
    "BufferGuard",
    "DynamicLossScaler",
    "FP16_Optimizer",
    "GradientReport",
    "LoadReport",
    "LossScaleError",
    "LossScaler",
    "PickledObject",
    "StepRecord",
    "__version__",
    "load_checkpoint",
    "optim",
]
