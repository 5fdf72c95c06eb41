"""The wheel: what it holds, where it imports, what it refuses, who can link it."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile

import pytest
import torch

from fp16core import __main__ as command
from fp16core import _build_info, _torch_check

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONSUMER = ROOT / "cpp" / "tests" / "consumer"
TORCH_ROOT = pathlib.Path(torch.__file__).resolve().parent
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])

# Uses a kernel, then says what of interest the process has mapped.
USE = """
from fp16core import DynamicLossScaler
parameter = torch.nn.Parameter(torch.zeros(1_000_000, dtype=torch.float16))
parameter.grad = torch.zeros_like(parameter)
assert not DynamicLossScaler().has_overflow([parameter])
parameter.grad[-1] = float("inf")
assert DynamicLossScaler().has_overflow([parameter])
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/" in line}
for name in ("libgomp", "libomp", "libiomp5", "libcudart", "libfp16core"):
    for file in sorted(f for f in files if f.split("/")[-1].startswith(name)):
        print(name, file)
"""


def run(
    *words: object, cwd: pathlib.Path, path: pathlib.Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command with PYTHONPATH set to ``path`` only."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def program(name: str) -> str:
    """Returns the path of a program, this environment's before the system's."""
    found = shutil.which(name, path=sysconfig.get_path("scripts"))
    found = found or shutil.which(name)
    assert found, f"{name} is needed, but was not found"
    return found


@pytest.fixture(scope="session")
def wheel() -> pathlib.Path:
    """The wheel under test."""
    if "FP16CORE_WHEEL" not in os.environ:
        assert "CI" not in os.environ, "FP16CORE_WHEEL must name the wheel in CI"
        pytest.skip("FP16CORE_WHEEL does not name a wheel; 'make test' sets it")
    return pathlib.Path(os.environ["FP16CORE_WHEEL"]).resolve()


@pytest.fixture(scope="session")
def environment(
    wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """The interpreter of a fresh environment with the wheel in it.

    torch and the rest of this environment are linked in rather than installed
    again, at the place that pip would have put them.
    """
    folder = tmp_path_factory.mktemp("environment")
    result = run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    assert result.returncode == 0, result.stdout
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    for entry in TORCH_ROOT.parent.iterdir():
        if not entry.name.startswith(("fp16core", "_fp16core", "__pycache__")):
            (site / entry.name).symlink_to(entry)
    # The environment has no pip of its own, so this one's installs into it.
    result = run(
        sys.executable,
        "-m",
        "pip",
        f"--python={python}",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    assert result.returncode == 0, result.stdout
    return python


@pytest.fixture(scope="session")
def prefix(environment: pathlib.Path) -> pathlib.Path:
    """What the fresh environment's ``--cmake-prefix`` says."""
    result = run(
        environment, "-m", "fp16core", "--cmake-prefix", cwd=environment.parent
    )
    assert result.returncode == 0, result.stdout
    return pathlib.Path(result.stdout.strip())


def wheel_text(wheel: pathlib.Path, pattern: str) -> str:
    """Returns the text of the wheel's one file that matches ``pattern``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if re.fullmatch(pattern, n)]
        return archive.read(name).decode()


# What the wheel holds.


def test_wheel_holds_everything_and_nothing_else(wheel: pathlib.Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    sources = {
        str(file.relative_to(ROOT / "python"))
        for file in (ROOT / "python/fp16core").rglob("*.py")
    }
    headers = {
        f"fp16core/include/fp16core/{file.name}"
        for file in (ROOT / "cpp/include/fp16core").glob("*.h")
    }
    package = {
        f"fp16core/lib/cmake/fp16core/{name}.cmake"
        for name in (
            "fp16coreConfig",
            "fp16coreConfigVersion",
            "fp16coreTargets",
            "fp16coreTargets-release",
            "fp16coreTorch",
        )
    }
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    assert names == sources | headers | package | {
        f"fp16core/_core{suffix}",
        "fp16core/_core.pyi",
        "fp16core/_build_info.py",
        "fp16core/py.typed",
        "fp16core/lib/libfp16core.so",
    }


def test_wheel_requires_the_torch_it_was_built_with(wheel: pathlib.Path) -> None:
    metadata = wheel_text(wheel, r"[^/]+\.dist-info/METADATA")
    (required,) = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert required == f"torch=={TORCH_MINOR}.*"
    assert f"\nVersion: {_build_info.version}\n" in metadata
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata


def test_source_distribution_requires_the_range_of_torch(
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("scikit_build_core")
    script = "from scikit_build_core.build import build_sdist as b; import sys; "
    result = run(sys.executable, "-c", script + "b(sys.argv[1])", tmp_path, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames()}
        (metadata,) = [n for n in tar.getnames() if n.endswith("/PKG-INFO")]
        file = tar.extractfile(metadata)
        assert file is not None
        text = file.read().decode()
    required = re.findall(r"^Requires-Dist: torch(.*)$", text, re.MULTILINE)
    assert [set(r.split(",")) for r in required] == [{">=2.11", "<2.16"}]
    assert "\nDynamic: Requires-Dist\n" in text
    assert {"CMakeLists.txt", "LICENSE", "cpp/cmake/torch_pin.py"} <= names
    assert not [n for n in names if n.startswith(("build/", ".venv"))]


def test_stub_types_tensors_and_private_names(wheel: pathlib.Path) -> None:
    stub = wheel_text(wheel, r"fp16core/_core\.pyi")
    assert "import torch" in stub
    assert "class OptimizerCore" in stub


def test_libraries_hold_no_path_of_the_build_machine(prefix: pathlib.Path) -> None:
    libraries = [*prefix.glob("_core*.so"), prefix / "lib" / "libfp16core.so"]
    assert len(libraries) == 2
    for library in libraries:
        result = run(program("readelf"), "-d", library, cwd=prefix)
        paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", result.stdout)
        assert len(paths) == 1, result.stdout
        for entry in paths[0].split(":"):
            assert entry.startswith("$ORIGIN/"), entry
        assert os.fsencode(ROOT) not in library.read_bytes()


# Where it imports, and what it refuses.


@pytest.mark.parametrize("first", ["torch", "fp16core", "fp16core._core"])
def test_imports_in_every_order_with_one_runtime(
    environment: pathlib.Path, first: str
) -> None:
    script = f"import {first}\nimport torch\n{USE}"
    result = run(environment, "-c", script, cwd=environment.parent)
    assert result.returncode == 0, result.stdout
    mapped = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    names = [name for name, _ in mapped]
    openmp = {"libgomp", "libomp", "libiomp5"}
    assert sum(name in openmp for name in names) == 1, result.stdout
    assert names.count("libcudart") == (torch.version.cuda is not None), result.stdout
    (library,) = [file for name, file in mapped if name == "libfp16core"]
    site = next(environment.parent.parent.glob("lib/python*/site-packages"))
    assert library == str(site / "fp16core" / "lib" / "libfp16core.so")


def test_another_torch_minor_is_refused_before_anything_is_loaded(
    environment: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text(
        '__version__ = "2.99.1+cpu"\nclass version:\n    cuda = None\n'
    )
    script = (
        "import sys\n"
        "try:\n    import fp16core\n"
        "except ImportError as error:\n    print(error)\n"
        "assert 'fp16core._core' not in sys.modules\n"
        "assert 'libfp16core' not in open('/proc/self/maps').read()\n"
    )
    result = run(environment, "-c", script, cwd=tmp_path, path=tmp_path)
    assert result.returncode == 0, result.stdout
    assert result.stdout.strip() == (
        f"fp16core {_build_info.version} was built against torch "
        f"{_build_info.torch_version}, but torch 2.99.1+cpu is installed. Install "
        f"the torch it was built for with \"pip install 'torch=={TORCH_MINOR}.*'\", "
        'or rebuild fp16core for yours with "pip install --no-cache-dir '
        '--force-reinstall --no-deps --no-build-isolation fp16core"'
    )


def test_this_torch_is_accepted() -> None:
    _torch_check.check_torch(torch.__version__, torch.version.cuda)


@pytest.mark.parametrize("version", ["2.13.1", "2.13.0+cu130", "2.13.0a0+git1234"])
def test_every_build_of_the_same_minor_is_accepted(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(_build_info, "torch_version", "2.13.0+cpu")
    monkeypatch.setattr(_build_info, "cuda", False)
    _torch_check.check_torch(version, "13.0")


@pytest.mark.parametrize("version", ["2.1.3", "2.130.0", "3.13.0"])
def test_versions_that_look_alike_are_refused(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(_build_info, "torch_version", "2.13.0+cpu")
    match = re.escape(f"against torch 2.13.0+cpu, but torch {version} is installed")
    with pytest.raises(ImportError, match=match):
        _torch_check.check_torch(version, None)


@pytest.mark.parametrize(
    ("cuda", "match"),
    [
        (None, "but torch 2.13.0, which has no CUDA, is installed"),
        ("12.9", "but torch 2.13.0 with CUDA 12.9 is installed"),
    ],
)
def test_a_torch_with_other_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, match: str
) -> None:
    monkeypatch.setattr(_build_info, "torch_version", "2.13.0+cu130")
    monkeypatch.setattr(_build_info, "cuda", True)
    monkeypatch.setattr(_build_info, "cuda_version", "13.0.88")
    with pytest.raises(ImportError, match=re.escape(match)):
        _torch_check.check_torch("2.13.0", cuda)
    _torch_check.check_torch("2.13.0", "13.2")


def test_a_source_folder_says_that_it_is_not_built(tmp_path: pathlib.Path) -> None:
    package = tmp_path / "fp16core"
    package.mkdir()
    for file in (ROOT / "python/fp16core").glob("*.py"):
        shutil.copy(file, package)
    result = run(sys.executable, "-c", "import fp16core", cwd=tmp_path, path=tmp_path)
    assert result.returncode == 1
    assert "ImportError: fp16core is not built here" in result.stdout


# The command line.


def test_info_says_what_is_installed(environment: pathlib.Path) -> None:
    result = run(environment, "-m", "fp16core", "--info", cwd=environment.parent)
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    width = len("instruction set")
    facts = {line[:width].strip(): line[width:].strip() for line in lines}
    assert list(facts) == [
        "fp16core",
        "torch",
        "python",
        "compiler",
        "backends",
        "instruction set",
        "threads",
        "fused steps",
    ]
    assert facts["fp16core"] == _build_info.version
    assert facts["torch"].startswith(torch.__version__)
    cuda = "compiled, not in use yet" if _build_info.cuda else "off"
    assert facts["backends"] == f"CPU on, CUDA {cuda}"
    assert facts["instruction set"] in {"DEFAULT", "AVX2", "AVX512"}
    assert int(facts["threads"]) >= 1
    rules = ["SGD", "Adam", "Adagrad", "RMSprop", "NAdam", "Adamax", "Lion"]
    assert facts["fused steps"].split(", ") == rules


def test_info_follows_the_environment(
    environment: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run(environment, "-m", "fp16core", "--info", cwd=environment.parent)
    assert "\ninstruction set  DEFAULT\n" in result.stdout
    assert "\nthreads          1\n" in result.stdout


def test_cmake_prefix_is_where_the_extension_lies(prefix: pathlib.Path) -> None:
    assert (prefix / "lib/cmake/fp16core/fp16coreConfig.cmake").is_file()
    assert (prefix / "lib/libfp16core.so").is_file()


def test_the_command_wants_exactly_one_question(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in ([], ["--info", "--cmake-prefix"]):
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert "usage: python -m fp16core" in capsys.readouterr().err


# Who can link it.


def configure(
    build: pathlib.Path, prefix: pathlib.Path, *definitions: str
) -> subprocess.CompletedProcess[str]:
    """Configures the consumer project against the package in ``prefix``."""
    return run(
        program("cmake"),
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={program('ninja')}",
        "-S",
        CONSUMER,
        "-B",
        build,
        f"-DCMAKE_PREFIX_PATH={prefix}",
        *definitions,
        cwd=build.parent,
    )


def words(text: str) -> str:
    """Undoes CMake's wrapping of messages."""
    return " ".join(text.split())


@pytest.mark.parametrize("find_torch", ["NEVER", "BEFORE", "AFTER"])
def test_cpp_application_builds_and_runs(
    prefix: pathlib.Path, tmp_path: pathlib.Path, find_torch: str
) -> None:
    definitions = [f"-DFIND_TORCH={find_torch}"]
    if find_torch != "NEVER" and torch.version.cuda is not None:
        pytest.skip("torch's own CMake package asks for a CUDA toolkit")
    if find_torch == "BEFORE":
        definitions.append(f"-DTorch_DIR={TORCH_ROOT}/share/cmake/Torch")
    result = configure(tmp_path / "build", prefix, *definitions)
    assert result.returncode == 0, result.stdout
    result = run(program("cmake"), "--build", tmp_path / "build", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    result = run(tmp_path / "build" / "consumer", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d+ steps applied, \d+ skipped", result.stdout)


def libtorch(folder: pathlib.Path, version: str, c10: bytes) -> pathlib.Path:
    """Makes what our package reads of a LibTorch; returns its Torch_DIR."""
    config = folder / "share" / "cmake" / "Torch"
    config.mkdir(parents=True)
    (config / "TorchConfigVersion.cmake").write_text(
        f'set(PACKAGE_VERSION "{version}")\n'
    )
    (folder / "lib").mkdir()
    (folder / "lib" / "libc10.so").write_bytes(c10)
    return config


def test_cmake_refuses_another_torch_minor(
    prefix: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    torch_dir = libtorch(tmp_path / "torch", "2.99.0", b"")
    result = configure(tmp_path / "build", prefix, f"-DTorch_DIR={torch_dir}")
    assert result.returncode != 0
    built = torch.__version__.split("+")[0]
    assert (
        f"fp16core {_build_info.version} was built against torch {built}, but found "
        f"torch 2.99.0 in {tmp_path}/torch."
    ) in words(result.stdout)


def test_cmake_refuses_another_abi(
    prefix: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    version = torch.__version__.split("+")[0]
    torch_dir = libtorch(tmp_path / "torch", version, b"_ZN3c105ErrorC1ESs")
    result = configure(tmp_path / "build", prefix, f"-DTorch_DIR={torch_dir}")
    assert result.returncode != 0
    assert (
        f"was built with _GLIBCXX_USE_CXX11_ABI=1 against torch {version}, but torch "
        f"{version} in {tmp_path}/torch has _GLIBCXX_USE_CXX11_ABI=0."
    ) in words(result.stdout)


def test_cmake_refuses_a_torch_without_cuda_for_a_build_with_it(
    prefix: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    copy = tmp_path / "fp16core"
    shutil.copytree(prefix, copy)
    config = copy / "lib/cmake/fp16core/fp16coreConfig.cmake"
    text = re.sub(
        r"set\(fp16core_CUDA \w+\)", "set(fp16core_CUDA TRUE)", config.read_text()
    )
    config.write_text(text)
    version = torch.__version__.split("+")[0]
    c10 = b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx11E"
    torch_dir = libtorch(tmp_path / "torch", version, c10)
    result = configure(tmp_path / "build", copy, f"-DTorch_DIR={torch_dir}")
    assert result.returncode != 0
    assert (
        f"was built with CUDA against torch {version}, but torch {version} in "
        f"{tmp_path}/torch has no CUDA."
    ) in words(result.stdout)


def test_cmake_says_that_it_found_no_torch(
    prefix: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    copy = tmp_path / "alone" / "fp16core"
    shutil.copytree(prefix, copy)
    result = configure(tmp_path / "build", copy)
    assert result.returncode != 0
    assert (
        f"needs LibTorch {TORCH_MINOR}, but found none. Set Torch_DIR to its folder "
        "share/cmake/Torch."
    ) in words(result.stdout)


# One pool of threads.


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernels_run_on_the_threads_that_torch_was_given(
    tmp_path: pathlib.Path, threads: int
) -> None:
    script = f"""
import os, torch, fp16core
torch.set_num_threads({threads})
before = len(os.listdir("/proc/self/task"))
parameter = torch.nn.Parameter(torch.zeros(4_000_000, dtype=torch.float16))
parameter.grad = torch.zeros_like(parameter)
fp16core.DynamicLossScaler().has_overflow([parameter])
ours = len(os.listdir("/proc/self/task")) - before
torch.zeros(4_000_000).add_(1)
both = len(os.listdir("/proc/self/task")) - before
print(ours, both)
"""
    import fp16core

    site = pathlib.Path(fp16core.__file__).parent.parent
    result = run(sys.executable, "-c", script, cwd=tmp_path, path=site)
    assert result.returncode == 0, result.stdout
    # The calling thread is one of them. torch, asked next, starts none of its own.
    assert result.stdout.split() == [str(threads - 1), str(threads - 1)]
