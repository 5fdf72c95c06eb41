# Decides whether the CUDA backend is built, and for which architectures.
#
# Sets FP16CORE_COMPILE_CUDA, whether the CUDA sources are compiled, and
# FP16CORE_WITH_CUDA, whether they are linked as well. Where they are compiled the
# language CUDA is enabled, and CMAKE_CUDA_ARCHITECTURES and FP16CORE_CUDART are
# set.

# Sets <out> to why the CUDA backend cannot be built, or to an empty string.
function(fp16core_why_no_cuda out)
  set(reason "")
  if(NOT FP16CORE_TORCH_CUDA AND NOT FP16CORE_CUDA STREQUAL "COMPILE")
    set(reason "torch ${FP16CORE_TORCH_FULL_VERSION} was built without CUDA")
  elseif(NOT CMAKE_CUDA_COMPILER)
    set(reason "no nvcc was found on PATH or below CUDA_HOME or CUDA_PATH")
  elseif(NOT CUDAToolkit_FOUND)
    set(reason "nvcc ${CMAKE_CUDA_COMPILER} has no headers and libcudart")
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES to what torch's wheels ship for and this nvcc
# knows: code for each, and PTX of the newest for GPUs yet to come.
macro(fp16core_choose_cuda_architectures)
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
    OUTPUT_VARIABLE _known
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
  )
  string(REPLACE "\n" ";" _known "${_known}")
  set(_architectures "")
  foreach(
    _architecture
    IN
    ITEMS 75 80 86 90 100 120
  )
    if("sm_${_architecture}" IN_LIST _known)
      list(APPEND _architectures "${_architecture}-real")
      set(_newest "${_architecture}")
    endif()
  endforeach()
  list(APPEND _architectures "${_newest}-virtual")
  set(
    CMAKE_CUDA_ARCHITECTURES
    "${_architectures}"
    CACHE STRING
    "GPU architectures to compile for."
    FORCE
  )
endmacro()

set(FP16CORE_COMPILE_CUDA FALSE)
set(FP16CORE_WITH_CUDA FALSE)
set(FP16CORE_CUDART "")

if(NOT FP16CORE_CUDA STREQUAL "OFF")
  # The language CUDA cannot be tried, only required, so nvcc is looked for first,
  # in a toolkit's usual places too.
  if(FP16CORE_TORCH_CUDA OR FP16CORE_CUDA STREQUAL "COMPILE")
    find_program(
      CMAKE_CUDA_COMPILER
      NAMES $ENV{CUDACXX} nvcc
      HINTS
      ENV CUDA_HOME
      ENV CUDA_PATH
      ${CUDAToolkit_ROOT}
      PATHS /usr/local/cuda
      PATH_SUFFIXES bin
      DOC "The compiler nvcc."
    )
  endif()
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit QUIET)
  endif()
  fp16core_why_no_cuda(_why)
  if(NOT _why)
    set(FP16CORE_COMPILE_CUDA TRUE)
    if(NOT FP16CORE_CUDA STREQUAL "COMPILE")
      set(FP16CORE_WITH_CUDA TRUE)
    endif()
  elseif(FP16CORE_CUDA STREQUAL "AUTO")
    message(STATUS "CUDA is off: ${_why}.")
  else()
    message(FATAL_ERROR "FP16CORE_CUDA=${FP16CORE_CUDA}, but ${_why}.")
  endif()
endif()

if(FP16CORE_COMPILE_CUDA AND FP16CORE_TORCH_CUDA_VERSION)
  set(_toolkit "${CUDAToolkit_VERSION_MAJOR}.${CUDAToolkit_VERSION_MINOR}")
  string(REGEX MATCH "^[0-9]+" _torch_major "${FP16CORE_TORCH_CUDA_VERSION}")
  if(NOT CUDAToolkit_VERSION_MAJOR EQUAL _torch_major)
    message(
      FATAL_ERROR
      "torch ${FP16CORE_TORCH_FULL_VERSION} was built with CUDA "
      "${FP16CORE_TORCH_CUDA_VERSION}, but the toolkit in "
      "${CUDAToolkit_TARGET_DIR} is CUDA ${_toolkit}. Set CUDA_PATH to a toolkit "
      "of CUDA ${_torch_major}, install a torch built with CUDA "
      "${CUDAToolkit_VERSION_MAJOR}, or switch CUDA off with FP16CORE_CUDA=OFF."
    )
  elseif(NOT _toolkit VERSION_EQUAL FP16CORE_TORCH_CUDA_VERSION)
    message(
      WARNING
      "torch ${FP16CORE_TORCH_FULL_VERSION} was built with CUDA "
      "${FP16CORE_TORCH_CUDA_VERSION}, the toolkit is CUDA ${_toolkit}. Minor "
      "versions work together, but are not tested together."
    )
  endif()
endif()

if(FP16CORE_COMPILE_CUDA)
  # CMake would link the toolkit's runtime, a second one beside torch's.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    fp16core_choose_cuda_architectures()
  endif()
  enable_language(CUDA)

  # torch's own copy of the runtime where it carries one: the toolkit's would be
  # a second one in the process, with its own idea of the current device.
  string(REGEX MATCH "^[0-9]+" _major "${FP16CORE_TORCH_CUDA_VERSION}")
  file(
    GLOB FP16CORE_CUDART
    "${FP16CORE_TORCH_ROOT}/lib/libcudart*.so*"
    "${FP16CORE_TORCH_ROOT}/../nvidia/cu${_major}/lib/libcudart.so.*"
    "${FP16CORE_TORCH_ROOT}/../nvidia/cuda_runtime/lib/libcudart.so.*"
  )
  if(FP16CORE_CUDART)
    list(GET FP16CORE_CUDART 0 FP16CORE_CUDART)
  else()
    set(FP16CORE_CUDART CUDA::cudart)
  endif()
  message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
endif()
