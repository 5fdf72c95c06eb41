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

from commands import configure, program, run
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


def test_the_core_library_knows_no_python(prefix: pathlib.Path) -> None:
    library = prefix / "lib" / "libfp16core.so"
    result = run(program("readelf"), "-d", library, cwd=prefix)
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", result.stdout)
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if "python" in name]


def test_the_core_library_exports_its_interface_alone(prefix: pathlib.Path) -> None:
    library = prefix / "lib" / "libfp16core.so"
    result = run(program("nm"), "-DC", "--defined-only", library, cwd=prefix)
    symbols = [line.split(" ", 2)[1:] for line in result.stdout.splitlines()]
    # Weak ones are inline functions of torch and of the standard library.
    # The linker marks the ends of data.
    marks = {"__bss_start", "_edata", "_end"}
    own = [name for kind, name in symbols if kind not in "WVu" and name not in marks]
    assert "fp16core::FP16Optimizer::update_master_grads()" in own
    for name in own:
        assert name.startswith(("fp16core::", "typeinfo", "vtable", "guard")), name
        for hidden in ("detail::", "::Impl::", "(anonymous namespace)"):
            assert hidden not in name.split("(")[0], name


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
    cuda = f"{_build_info.cuda_version} on" if _build_info.cuda else "off"
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


def words(text: str) -> str:
    """Undoes CMake's wrapping of messages."""
    return " ".join(text.split())


def build_and_run(build: pathlib.Path) -> None:
    """Builds the consumer that was configured in ``build``, and runs it."""
    result = run(program("cmake"), "--build", build, cwd=build)
    assert result.returncode == 0, result.stdout
    result = run(build / "consumer", cwd=build)
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d+ steps applied, \d+ skipped", result.stdout)


def test_an_application_that_has_found_torch_builds_and_runs(
    prefix: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch's own CMake package asks for a CUDA toolkit")
    result = configure(
        CONSUMER,
        tmp_path / "build",
        prefix,
        "-DFIND_TORCH=BEFORE",
        f"-DTorch_DIR={TORCH_ROOT}/share/cmake/Torch",
    )
    assert result.returncode == 0, result.stdout
    build_and_run(tmp_path / "build")


def test_torch_found_after_fp16core_is_the_same(
    prefix: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    if torch.version.cuda is not None:
        pytest.skip("torch's own CMake package asks for a CUDA toolkit")
    result = configure(CONSUMER, tmp_path / "build", prefix, "-DFIND_TORCH=AFTER")
    assert result.returncode == 0, result.stdout
    cache = (tmp_path / "build" / "CMakeCache.txt").read_text()
    (found,) = re.findall(r"^Torch_DIR:\w+=(.*)$", cache, re.MULTILINE)
    assert pathlib.Path(found).samefile(TORCH_ROOT / "share" / "cmake" / "Torch")


@pytest.fixture(scope="session")
def plain_libtorch(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A LibTorch without Python: what an archive of it holds."""
    folder = tmp_path_factory.mktemp("libtorch")
    for name in ("include", "share"):
        (folder / name).symlink_to(TORCH_ROOT / name)
    (folder / "lib").mkdir()
    for library in (TORCH_ROOT / "lib").iterdir():
        if "python" not in library.name:
            (folder / "lib" / library.name).symlink_to(library)
    return folder


def test_cmake_install_serves_applications_without_python(
    plain_libtorch: pathlib.Path, wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert "FP16CORE_BUILD" in os.environ, "FP16CORE_BUILD must name the build folder"
    prefix = tmp_path / "prefix"
    result = run(
        program("cmake"),
        "--install",
        os.environ["FP16CORE_BUILD"],
        "--prefix",
        prefix,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout
    for extension in {*prefix.glob("_*"), *prefix.glob("*.py*")}:
        extension.unlink()
    torch_dir = plain_libtorch / "share" / "cmake" / "Torch"
    build = tmp_path / "build"
    # The folder as it is named, not where its links lead to.
    result = configure(CONSUMER, build, prefix, f"-DTorch_DIR={torch_dir}")
    assert result.returncode == 0, result.stdout
    build_and_run(build)
    libraries = run("ldd", build / "consumer", cwd=build).stdout
    assert f"{prefix}/lib/libfp16core.so" in libraries
    assert f"{plain_libtorch}/lib/libtorch_cpu.so" in libraries
    assert "python" not in libraries.replace(str(tmp_path), "").replace(
        str(plain_libtorch), ""
    )


def test_sources_may_be_part_of_an_application(tmp_path: pathlib.Path) -> None:
    # Up to the compilation of the application, which needs all that the target
    # carries; the library itself is built often enough.
    build = tmp_path / "build"
    result = configure(
        CONSUMER,
        build,
        tmp_path,
        f"-DFP16CORE_SOURCE={ROOT}",
        f"-DTorch_DIR={TORCH_ROOT}/share/cmake/Torch",
    )
    assert result.returncode == 0, result.stdout
    targets = run(program("ninja"), "-t", "targets", "all", cwd=build).stdout
    assert "lib/libfp16core.so: " in targets
    assert "bindings" not in targets
    result = run(
        program("cmake"),
        "--build",
        build,
        "--target",
        "CMakeFiles/consumer.dir/main.cpp.o",
        cwd=build,
    )
    assert result.returncode == 0, result.stdout
    commands = run(program("ninja"), "-t", "commands", cwd=build).stdout
    kernels = re.findall(r".*simd/updates\.cpp$", commands, re.MULTILINE)
    assert kernels and all(" -O3 " in line for line in kernels)


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
    result = configure(CONSUMER, tmp_path / "build", prefix, f"-DTorch_DIR={torch_dir}")
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
    result = configure(CONSUMER, tmp_path / "build", prefix, f"-DTorch_DIR={torch_dir}")
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
    result = configure(CONSUMER, tmp_path / "build", copy, f"-DTorch_DIR={torch_dir}")
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
    result = configure(CONSUMER, tmp_path / "build", copy)
    assert result.returncode != 0
    assert (
        f"needs LibTorch {TORCH_MINOR}, but found none. Set Torch_DIR to its folder "
        "share/cmake/Torch."
    ) in words(result.stdout)


# Whether CUDA is built, and for what.

NVCC = """#!/bin/sh
case $1 in
--version) echo "Cuda compilation tools, release {0}, V{0}.86" ;;
--list-gpu-code) printf 'sm_75\\nsm_80\\nsm_90\\nsm_103\\n' ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def scratch(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder, and an environment that names no CUDA toolkit of this machine."""
    for name in ("CUDACXX", "CUDAARCHS", "CUDAToolkit_ROOT", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "toolkit"))
    return tmp_path


def toolkit(scratch: pathlib.Path, version: str) -> None:
    """Makes what CMake reads of a CUDA toolkit; its nvcc compiles nothing."""
    folder = scratch / "toolkit"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "lib64/libcudart.so"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(NVCC.format(version) if name == "bin/nvcc" else "")
    (folder / "bin/nvcc").chmod(0o755)


def configure_core(
    scratch: pathlib.Path, tag: str, *definitions: str
) -> subprocess.CompletedProcess[str]:
    """Configures the C++ core for a made-up torch 2.13.0 with the local ``tag``."""
    site = scratch / "site-packages"
    folder = site / "torch"
    if not folder.exists():
        libtorch(folder, "2.13.0", b"")
        (folder / "build-version").write_text(f"2.13.0+{tag}\n")
        (folder / "include/torch/csrc/api/include").mkdir(parents=True)
        libraries = [folder / "lib" / "libtorch_cpu.so", folder / "lib/libgomp.so.1"]
        if tag != "cpu":
            libraries.append(folder / "lib" / "libtorch_cuda.so")
            # Beside torch's runtime an older one that another package left behind.
            major = tag[2:-1]
            libraries += [
                site / "nvidia" / f"cu{major}" / "lib" / f"libcudart.so.{major}",
                site / "nvidia" / "cuda_runtime" / "lib" / "libcudart.so.11",
            ]
        # CMake links a library by its path only where that has a soname.
        for library in libraries:
            library.parent.mkdir(parents=True, exist_ok=True)
            library.symlink_to(TORCH_ROOT / "lib" / "libc10.so")
    return configure(
        ROOT,
        scratch / "build",
        None,
        "-DFP16CORE_BUILD_PYTHON=OFF",
        f"-DTorch_DIR={folder}/share/cmake/Torch",
        *definitions,
    )


def hide_nvcc() -> str:
    """Returns the definition that hides every nvcc of this machine from CMake."""
    folders = [*os.environ["PATH"].split(os.pathsep), "/usr/local/cuda/bin"]
    holding = [folder for folder in folders if (pathlib.Path(folder) / "nvcc").exists()]
    return f"-DCMAKE_IGNORE_PATH={';'.join(holding)}"


def test_cuda_is_off_for_a_torch_without_it(scratch: pathlib.Path) -> None:
    toolkit(scratch, "13.0")
    result = configure_core(scratch, "cpu")
    assert result.returncode == 0, result.stdout
    why = "torch 2.13.0+cpu was built without CUDA"
    lines = [line for line in result.stdout.splitlines() if "CUDA" in line]
    assert lines == [f"-- CUDA is off: {why}."]
    result = configure_core(scratch, "cpu", "-DFP16CORE_CUDA=ON")
    assert result.returncode != 0
    assert f"FP16CORE_CUDA=ON, but {why}." in words(result.stdout)


@pytest.mark.parametrize("missing", ["nvcc", "headers", "version"])
def test_cuda_is_off_without_a_toolkit(scratch: pathlib.Path, missing: str) -> None:
    definition = hide_nvcc()
    if missing != "nvcc":
        toolkit(scratch, "13.0" if missing == "headers" else "unknown")
    nvcc = scratch / "toolkit" / "bin" / "nvcc"
    (scratch / "toolkit/include/cuda_runtime.h").unlink(missing_ok=True)
    why = {
        "nvcc": "no nvcc was found on PATH or below CUDA_HOME or CUDA_PATH",
        "headers": f"{nvcc} has no headers or no libcudart",
        "version": f"{nvcc} does not say its version",
    }[missing]
    result = configure_core(scratch, "cu130", definition)
    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if "CUDA" in line]
    assert lines == [f"-- CUDA is off: {why}."]
    result = configure_core(scratch, "cu130", "-DFP16CORE_CUDA=ON")
    assert result.returncode != 0
    assert f"FP16CORE_CUDA=ON, but {why}." in words(result.stdout)


def test_cuda_can_be_switched_off(scratch: pathlib.Path) -> None:
    toolkit(scratch, "13.0")
    result = configure_core(scratch, "cu130", "-DFP16CORE_CUDA=OFF")
    assert result.returncode == 0, result.stdout
    assert "CUDA" not in result.stdout


def test_a_choice_that_does_not_exist_is_refused(scratch: pathlib.Path) -> None:
    result = configure_core(scratch, "cpu", "-DFP16CORE_CUDA=0")
    assert result.returncode != 0
    assert (
        "FP16CORE_CUDA is '0', but must be one of AUTO, ON, OFF, COMPILE."
    ) in words(result.stdout)


@pytest.mark.parametrize("choice", ["AUTO", "ON"])
def test_a_toolkit_of_another_major_version_is_refused(
    scratch: pathlib.Path, choice: str
) -> None:
    toolkit(scratch, "12.9")
    result = configure_core(scratch, "cu130", f"-DFP16CORE_CUDA={choice}")
    assert result.returncode != 0
    assert (
        "torch 2.13.0+cu130 was built with CUDA 13.0, but the toolkit in "
        f"{scratch}/toolkit is CUDA 12.9. Set CUDA_PATH to a toolkit of CUDA 13, "
        "install a torch built with CUDA 12, or switch CUDA off with "
        "FP16CORE_CUDA=OFF."
    ) in words(result.stdout)


def test_a_toolkit_of_another_minor_version_is_warned_of(scratch: pathlib.Path) -> None:
    toolkit(scratch, "13.2")
    output = words(configure_core(scratch, "cu130").stdout)
    assert "CMake Warning" in output
    assert (
        "torch 2.13.0+cu130 was built with CUDA 13.0, the toolkit is CUDA 13.2."
    ) in output
    assert "-- CUDA 13.2.86 for " in output


@pytest.mark.parametrize(
    ("variables", "definitions", "expected"),
    [
        ({}, [], "75-real;80-real;90-real;90-virtual"),
        ({"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX"}, [], "80-real;90-real;90-virtual"),
        ({"TORCH_CUDA_ARCH_LIST": " 9.0a, 10.3;"}, [], "90a-real;103-real"),
        ({"CUDAARCHS": "80"}, [], "80"),
        (
            {"TORCH_CUDA_ARCH_LIST": "8.0"},
            ["-DCMAKE_CUDA_ARCHITECTURES=90"],
            "90",
        ),
    ],
)
def test_architectures(
    scratch: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    definitions: list[str],
    expected: str,
) -> None:
    toolkit(scratch, "13.0")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = configure_core(scratch, "cu130", *definitions)
    assert f"-- CUDA 13.0.86 for {expected}\n" in result.stdout


def test_architectures_follow_the_environment_when_it_changes(
    scratch: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit(scratch, "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert "13.0.86 for 80-real\n" in configure_core(scratch, "cu130").stdout
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert "13.0.86 for 90-real\n" in configure_core(scratch, "cu130").stdout
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    assert "13.0.86 for 90-real\n" in configure_core(scratch, "cu130").stdout


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("Hopper", "names 'Hopper', but only numbers such as 8.0 or 9.0+PTX are"),
        ("5.0", "names 5.0, which nvcc 13.0.86 does not know."),
    ],
)
def test_architectures_that_cannot_be_built_are_refused(
    scratch: pathlib.Path, monkeypatch: pytest.MonkeyPatch, entry: str, why: str
) -> None:
    toolkit(scratch, "13.0")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", f"8.0;{entry}")
    result = configure_core(scratch, "cu130")
    assert result.returncode != 0
    assert f"TORCH_CUDA_ARCH_LIST {why}" in words(result.stdout)


def test_one_cuda_runtime_is_linked(
    scratch: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH")
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        assert os.environ.get("FP16CORE_REQUIRE_CUDA") != "1", "there is no nvcc"
        pytest.skip("there is no nvcc on this machine")
    version = run(nvcc, "--version", cwd=scratch).stdout
    release = re.search(r"release (\d+)\.(\d+)", version)
    assert release, version
    major, minor = release.groups()
    result = configure_core(
        scratch,
        f"cu{major}{minor}",
        "-DFP16CORE_CUDA=ON",
        "-DCMAKE_CUDA_ARCHITECTURES=90",
        "-DCMAKE_CUDA_ABI_COMPILED=TRUE",  # saves seconds
    )
    assert result.returncode == 0, result.stdout
    ninja = (scratch / "build" / "build.ninja").read_text()
    (link,) = re.findall(r"^build lib/libfp16core\.so:(?:.*\n)(?:  .*\n)*", ninja, re.M)
    (libraries,) = re.findall(r"^  LINK_LIBRARIES = (.*)$", link, re.M)
    assert [word for word in libraries.split() if "libcudart" in word] == [
        f"{scratch}/site-packages/torch/../nvidia/cu{major}/lib/libcudart.so.{major}"
    ]
    assert "cudart_static" not in link


PTXAS = """[1/3] Building CUDA object a.cu.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN1a4goodEPf' for 'sm_80'
ptxas info    : Function properties for _ZN1a4goodEPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 8 bytes smem, 8 bytes cmem[0]
ptxas info    : Compiling entry function '_Z3badIN1a3SgdEEvPf' for 'sm_120'
ptxas info    : Function properties for _Z3badIN1a3SgdEEvPf
    {1} bytes stack frame, {2} bytes spill stores, {2} bytes spill loads
ptxas info    : Used {0} registers, used 0 barriers
ptxas info    : Function properties for _ZN1a6calledEv
    {3} bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


@pytest.mark.parametrize(
    ("numbers", "over"),
    [
        ((128, 0, 0, 0), None),
        ((129, 0, 0, 0), "bad<Sgd>"),
        ((32, 8, 0, 0), "bad<Sgd>"),
        ((32, 0, 4, 0), "bad<Sgd>"),
        ((32, 0, 0, 16), "called"),
    ],
)
def test_kernels_that_need_too_much_are_named(
    tmp_path: pathlib.Path, numbers: tuple[int, ...], over: str | None
) -> None:
    log = tmp_path / "log"
    log.write_text(PTXAS.format(*numbers))
    script = ROOT / "cpp" / "cmake" / "cuda_resources.py"
    result = run(sys.executable, script, "--ptxas", log, cwd=tmp_path)
    assert result.returncode == (over is not None), result.stdout
    named = re.findall(r"^(\S+) for sm_\d+ is over the limits", result.stdout, re.M)
    assert named == ([] if over is None else [over])
    log.write_text("ninja: no work to do.\n")
    assert run(sys.executable, script, "--ptxas", log, cwd=tmp_path).returncode == 1


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
