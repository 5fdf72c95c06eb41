# How the sources are compiled: warnings, numerics, threads, instruction sets.

# Instruction sets the SIMD sources are compiled for, the baseline first.
set(FP16CORE_CPU_CAPABILITIES DEFAULT)
# The loops of all rules take a minute to optimize for it, and hardly anybody runs
# them.
set(FP16CORE_CPU_FLAGS_DEFAULT "$<$<CONFIG:Release>:-O2>")
set(FP16CORE_CPU_FLAGS_AVX2 -mavx2 -mfma -mf16c)
# gcc 12 takes the undefined vectors in its own AVX-512 headers for mistakes of
# whoever calls them.
set(
  FP16CORE_CPU_FLAGS_AVX512
  -mavx512f
  -mavx512bw
  -mavx512vl
  -mavx512dq
  -mfma
  -mf16c
  -Wno-uninitialized
  -Wno-maybe-uninitialized
)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND FP16CORE_CPU_CAPABILITIES AVX2 AVX512)
endif()

# at::parallel_for is a header: in a file compiled without OpenMP it runs
# serially and says nothing. Linked is torch's own runtime, found by its path, so
# that one pool of threads serves torch and us.
if(FP16CORE_TORCH_OPENMP AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(FP16CORE_OPENMP_FLAGS -fopenmp)
  set(FP16CORE_OPENMP_LIBRARY "${FP16CORE_TORCH_OPENMP}")
else()
  find_package(OpenMP REQUIRED COMPONENTS CXX)
  set(FP16CORE_OPENMP_FLAGS ${OpenMP_CXX_FLAGS})
  set(FP16CORE_OPENMP_LIBRARY ${OpenMP_CXX_LIBRARIES})
  message(
    WARNING
    "fp16core links the compiler's OpenMP runtime, because torch carries none "
    "that ${CMAKE_CXX_COMPILER_ID} can use. Where it differs from torch's, the "
    "process has two pools of threads."
  )
endif()

# Where the installed library looks for torch, and for the CUDA runtime that
# torch loads: beside the package, as pip installs them.
set(FP16CORE_EXTENSION_RPATH "$ORIGIN/lib" "$ORIGIN/../torch/lib")
set(FP16CORE_LIBRARY_RPATH "$ORIGIN/../../torch/lib")
if(FP16CORE_WITH_CUDA)
  if(FP16CORE_TORCH_CUDA_VERSION VERSION_GREATER_EQUAL 13)
    string(REGEX MATCH "^[0-9]+" _major "${FP16CORE_TORCH_CUDA_VERSION}")
    set(_runtime "cu${_major}")
  else()
    set(_runtime cuda_runtime)
  endif()
  list(PREPEND FP16CORE_LIBRARY_RPATH "$ORIGIN/../../nvidia/${_runtime}/lib")
endif()
# A wheel keeps nothing of the machine that built it. Installed to a prefix of
# its own, the library has torch where it was at the build and nowhere else.
if(NOT SKBUILD)
  list(APPEND FP16CORE_EXTENSION_RPATH "${FP16CORE_TORCH_ROOT}/lib")
  list(APPEND FP16CORE_LIBRARY_RPATH "${FP16CORE_TORCH_ROOT}/lib")
  if(FP16CORE_CUDART AND NOT TARGET "${FP16CORE_CUDART}")
    cmake_path(GET FP16CORE_CUDART PARENT_PATH _runtime)
    list(APPEND FP16CORE_LIBRARY_RPATH "${_runtime}")
  endif()
endif()

# Warnings, and messages that name a source file by its path in the project.
function(fp16core_common_options target)
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>"
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=>"
  )
  set(warnings -Wall -Wextra)
  if(FP16CORE_WERROR)
    list(APPEND warnings -Werror)
  endif()
  target_compile_options(
    ${target}
    PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>"
  )
  list(JOIN warnings "," host_warnings)
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${host_warnings}>"
      "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${FP16CORE_WERROR}>>:-Werror=all-warnings>"
  )
endfunction()

# Everything that a part of libfp16core, or a test that links its objects, needs.
function(fp16core_compile_options target)
  fp16core_common_options(${target})
  set_target_properties(
    ${target}
    PROPERTIES
      POSITION_INDEPENDENT_CODE ON
      CXX_EXTENSIONS OFF
      CXX_VISIBILITY_PRESET hidden
      CUDA_VISIBILITY_PRESET hidden
      VISIBILITY_INLINES_HIDDEN ON
  )
  target_compile_definitions(
    ${target}
    PRIVATE
      FP16CORE_BUILDING
      $<$<IN_LIST:AVX2,${FP16CORE_CPU_CAPABILITIES}>:FP16CORE_HAVE_X86_CAPABILITIES=1>
  )
  # In a project that chooses no build type, this library is optimized all the
  # same.
  target_compile_options(
    ${target}
    PRIVATE "$<$<AND:$<CONFIG:>,$<COMPILE_LANGUAGE:CXX>>:-O3>"
  )
  # Results must not depend on the instruction set, so a multiplication and an
  # addition are fused only where the source says so.
  target_compile_options(
    ${target}
    PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;${FP16CORE_OPENMP_FLAGS}>"
      "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>"
  )
  if(FP16CORE_CUDA STREQUAL "COMPILE")
    # What each kernel needs of a GPU, for cuda_resources.py to read.
    target_compile_options(
      ${target}
      PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>"
    )
  endif()
  if(FP16CORE_SANITIZE)
    set(
      sanitize
      -fsanitize=${FP16CORE_SANITIZE}
      -fno-sanitize-recover=all
      -fno-omit-frame-pointer
    )
    target_compile_options(
      ${target}
      PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize}>"
    )
  endif()
endfunction()

# Torch's headers take most of the time that a source compiles.
function(fp16core_precompile_headers target)
  if(FP16CORE_PRECOMPILE_HEADERS)
    target_precompile_headers(${target} PRIVATE ${ARGN})
  endif()
endfunction()

# What a library or program made of such parts needs at its link.
function(fp16core_link_options target)
  if(FP16CORE_SANITIZE)
    target_link_options(${target} PRIVATE -fsanitize=${FP16CORE_SANITIZE})
  endif()
endfunction()
