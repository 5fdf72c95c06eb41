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
  elseif(NOT CUDAToolkit_VERSION)
    set(reason "${CMAKE_CUDA_COMPILER} does not say its version")
  elseif(NOT CUDAToolkit_FOUND)
    set(reason "${CMAKE_CUDA_COMPILER} has no headers or no libcudart")
  endif()
  set(${out} "${reason}" PARENT_SCOPE)
endfunction()

# Sets <out> to <entries> of TORCH_CUDA_ARCH_LIST, such as "8.0;9.0a+PTX", in
# CMake's notation. <known> is what this nvcc compiles for.
function(fp16core_read_torch_arch_list out entries known)
  set(architectures "")
  foreach(entry IN LISTS entries)
    if(NOT entry MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(
        FATAL_ERROR
        "TORCH_CUDA_ARCH_LIST names '${entry}', but only numbers such as 8.0 or "
        "9.0+PTX are understood. Change it, or set CMAKE_CUDA_ARCHITECTURES, "
        "which goes first."
      )
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(variant "${CMAKE_MATCH_3}")
    set(ptx "${CMAKE_MATCH_4}")
    if(NOT "sm_${number}" IN_LIST known)
      message(
        FATAL_ERROR
        "TORCH_CUDA_ARCH_LIST names ${entry}, which nvcc ${CUDAToolkit_VERSION} "
        "does not know. Change it, or set CMAKE_CUDA_ARCHITECTURES, which goes "
        "first."
      )
    endif()
    list(APPEND architectures "${number}${variant}-real")
    if(ptx)
      list(APPEND architectures "${number}${variant}-virtual")
    endif()
  endforeach()
  set(${out} "${architectures}" PARENT_SCOPE)
endfunction()

# Sets <out> to what torch's wheels ship for and is in <known>: code for each, and
# PTX of the newest for GPUs yet to come.
function(fp16core_default_cuda_architectures out known)
  set(architectures "")
  set(newest "")
  foreach(
    number
    IN
    ITEMS 75 80 86 90 100 120
  )
    if("sm_${number}" IN_LIST known)
      list(APPEND architectures "${number}-real")
      set(newest "${number}")
    endif()
  endforeach()
  if(newest)
    list(APPEND architectures "${newest}-virtual")
  endif()
  set(${out} "${architectures}" PARENT_SCOPE)
endfunction()

# Sets CMAKE_CUDA_ARCHITECTURES where nobody did: from the environment, as torch's
# own extensions and as CMake read it, or to the default. What was chosen by an
# earlier run stays, unless TORCH_CUDA_ARCH_LIST is set and may have changed.
function(fp16core_choose_cuda_architectures)
  set(chosen "${FP16CORE_CHOSEN_CUDA_ARCHITECTURES}")
  string(REGEX MATCHALL "[^ ,;]+" for_torch "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(
    CMAKE_CUDA_ARCHITECTURES
    AND NOT (CMAKE_CUDA_ARCHITECTURES STREQUAL chosen AND for_torch)
  )
    return()
  endif()
  execute_process(
    COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-code
    OUTPUT_VARIABLE known
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY
  )
  string(REPLACE "\n" ";" known "${known}")
  if(for_torch)
    fp16core_read_torch_arch_list(architectures "${for_torch}" "${known}")
  elseif(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(architectures "$ENV{CUDAARCHS}")
  else()
    fp16core_default_cuda_architectures(architectures "${known}")
  endif()
  set(
    CMAKE_CUDA_ARCHITECTURES
    "${architectures}"
    CACHE STRING
    "GPU architectures to compile for."
    FORCE
  )
  set(FP16CORE_CHOSEN_CUDA_ARCHITECTURES "${architectures}" CACHE INTERNAL "")
endfunction()

# Sets <out> to the CUDA runtime to link: torch's own copy where it carries one.
# The toolkit's would be a second one in the process, with its own idea of the
# current device.
function(fp16core_find_cudart out)
  string(REGEX MATCH "^[0-9]*" major "${FP16CORE_TORCH_CUDA_VERSION}")
  set(site_packages "${FP16CORE_TORCH_ROOT}/..")
  set(${out} CUDA::cudart PARENT_SCOPE)
  foreach(
    pattern
    IN
    ITEMS
      "${FP16CORE_TORCH_ROOT}/lib/libcudart*.so.${major}*"
      "${site_packages}/nvidia/cu${major}/lib/libcudart.so.${major}*"
      "${site_packages}/nvidia/cuda_runtime/lib/libcudart.so.${major}*"
  )
    file(GLOB found "${pattern}")
    if(found)
      list(GET found 0 found)
      set(${out} "${found}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

set(FP16CORE_COMPILE_CUDA FALSE)
set(FP16CORE_WITH_CUDA FALSE)
set(FP16CORE_CUDART "")

set(_choices AUTO ON OFF COMPILE)
if(NOT FP16CORE_CUDA IN_LIST _choices)
  list(JOIN _choices ", " _choices)
  message(
    FATAL_ERROR
    "FP16CORE_CUDA is '${FP16CORE_CUDA}', but must be one of ${_choices}."
  )
endif()

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
    # Of what it misses it would say more than the one line below.
    set(CMAKE_MESSAGE_LOG_LEVEL WARNING)
    find_package(CUDAToolkit QUIET)
    unset(CMAKE_MESSAGE_LOG_LEVEL)
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
  fp16core_choose_cuda_architectures()
  message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
  enable_language(CUDA)
  fp16core_find_cudart(FP16CORE_CUDART)
endif()
