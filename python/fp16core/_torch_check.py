"""Compares the torch that runs with the torch that fp16core was built against."""

try:
    from fp16core import _build_info as built
except ImportError as error:
    raise ImportError(
        "fp16core is not built here: it has no _build_info. Install it with "
        "'pip install --no-build-isolation .' in its source folder, and import it "
        "from another folder than python/"
    ) from error


def check_torch(torch_version: str, torch_cuda: str | None) -> None:
    """Raises ImportError where the extension does not fit the running torch.

    LibTorch's C++ interface changes with every minor version, and much of a
    mismatch loads without complaint: so this is called before the extension is.

    Args:
        torch_version: ``torch.__version__``.
        torch_cuda: ``torch.version.cuda``, None for a torch without CUDA.
    """
    wanted = _minor(built.torch_version)
    if _minor(torch_version) != wanted:
        raise ImportError(
            f"fp16core {built.version} was built against torch "
            f"{built.torch_version}, but torch {torch_version} is installed. "
            f"{_cure(wanted)}"
        )
    if not built.cuda:
        return
    if torch_cuda is None:
        raise ImportError(
            f"fp16core {built.version} was built with CUDA against torch "
            f"{built.torch_version}, but torch {torch_version}, which has no CUDA, "
            f"is installed. {_cure(wanted)}"
        )
    if _major(torch_cuda) != _major(built.cuda_version):
        raise ImportError(
            f"fp16core {built.version} was built with CUDA {built.cuda_version} "
            f"against torch {built.torch_version}, but torch {torch_version} with "
            f"CUDA {torch_cuda} is installed. {_cure(wanted)}"
        )


def _cure(minor: str) -> str:
    return (
        f"Install the torch it was built for with \"pip install 'torch=={minor}.*'\", "
        'or rebuild fp16core for yours with "pip install --no-cache-dir '
        '--force-reinstall --no-deps --no-build-isolation fp16core"'
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _major(version: str) -> str:
    return version.split(".")[0]
