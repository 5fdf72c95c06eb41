# Finds the torch to build against: Torch_DIR where it is given, else the torch
# of the build interpreter, which is asked for its folder without importing it.

include("${CMAKE_CURRENT_LIST_DIR}/fp16coreTorch.cmake")

# Sets <out> to the folder of the Python package <name>, or to an empty string.
function(fp16core_python_package out name)
  string(
    CONCAT script
    "import importlib.util, pathlib; "
    "spec = importlib.util.find_spec('${name}'); "
    "print(pathlib.Path(spec.origin).parent if spec and spec.origin else '')"
  )
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "${script}"
    OUTPUT_VARIABLE folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
  )
  set(${out} "${folder}" PARENT_SCOPE)
endfunction()

# CMAKE_PREFIX_PATH is no guide here: in an isolated build it lists the outer
# environment, with another torch in it, before the inner one.
set(FP16CORE_TORCH_ROOT "")
if(Python_EXECUTABLE AND NOT Torch_DIR)
  fp16core_python_package(FP16CORE_TORCH_ROOT torch)
endif()
if(NOT FP16CORE_TORCH_ROOT)
  fp16core_locate_torch(FP16CORE_TORCH_ROOT "")
endif()
if(NOT EXISTS "${FP16CORE_TORCH_ROOT}/lib/libtorch_cpu.so")
  message(
    FATAL_ERROR
    "fp16core needs torch, but found none (interpreter: "
    "'${Python_EXECUTABLE}', Torch_DIR: '${Torch_DIR}'). Install torch into the "
    "environment of that interpreter, or set Torch_DIR to the folder "
    "share/cmake/Torch of a LibTorch."
  )
endif()

fp16core_describe_torch("${FP16CORE_TORCH_ROOT}")
if(
  FP16CORE_TORCH_VERSION VERSION_LESS 2.11
  OR FP16CORE_TORCH_VERSION VERSION_GREATER_EQUAL 2.16
)
  message(
    FATAL_ERROR
    "fp16core needs torch 2.11 to 2.15, but found torch "
    "${FP16CORE_TORCH_VERSION} in ${FP16CORE_TORCH_ROOT}."
  )
endif()

# The full version, with a tag such as +cpu, and the version of CUDA are written
# in the wheel's version.py or in the archive's build-version.
set(FP16CORE_TORCH_FULL_VERSION "${FP16CORE_TORCH_VERSION}")
set(FP16CORE_TORCH_CUDA_VERSION "")
if(EXISTS "${FP16CORE_TORCH_ROOT}/version.py")
  file(READ "${FP16CORE_TORCH_ROOT}/version.py" text)
  if(text MATCHES "__version__ = '([^']+)'")
    set(FP16CORE_TORCH_FULL_VERSION "${CMAKE_MATCH_1}")
  endif()
  if(text MATCHES "cuda[^=]*= '([0-9]+\\.[0-9]+)'")
    set(FP16CORE_TORCH_CUDA_VERSION "${CMAKE_MATCH_1}")
  endif()
elseif(EXISTS "${FP16CORE_TORCH_ROOT}/build-version")
  file(STRINGS "${FP16CORE_TORCH_ROOT}/build-version" text LIMIT_COUNT 1)
  if(text)
    set(FP16CORE_TORCH_FULL_VERSION "${text}")
  endif()
  if(text MATCHES "\\+cu([0-9]+)([0-9])$")
    set(FP16CORE_TORCH_CUDA_VERSION "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
  endif()
endif()

string(
  REGEX MATCH "^[0-9]+\\.[0-9]+"
  FP16CORE_TORCH_MINOR
  "${FP16CORE_TORCH_VERSION}"
)
string(REPLACE "." "\\\\." FP16CORE_TORCH_MINOR_REGEX "${FP16CORE_TORCH_MINOR}")

fp16core_import_torch("${FP16CORE_TORCH_ROOT}")
message(STATUS "torch ${FP16CORE_TORCH_FULL_VERSION} in ${FP16CORE_TORCH_ROOT}")
