# Describes an installed LibTorch and imports it as the target fp16core::torch.
#
# torch's own CMake package is not used: a CUDA build of torch refuses to be
# found where no CUDA toolkit is installed, and its targets bring along paths of
# the machine that built it. This file serves our build and, installed beside
# fp16coreConfig.cmake, every consumer; find_package(Torch) may be called too,
# before or after, since no name here is one of torch's.

# Sets <out> to the root folder of the LibTorch that holds include/ and lib/, or
# to an empty string. <beside> is a folder to try before CMAKE_PREFIX_PATH.
function(fp16core_locate_torch out beside)
  set(root "")
  if(Torch_DIR)
    get_filename_component(root "${Torch_DIR}/../../.." ABSOLUTE)
  elseif(EXISTS "${beside}/share/cmake/Torch/TorchConfigVersion.cmake")
    get_filename_component(root "${beside}" ABSOLUTE)
  else()
    # The list in the environment is separated as PATH is, not by semicolons.
    file(TO_CMAKE_PATH "$ENV{CMAKE_PREFIX_PATH}" from_environment)
    find_path(
      config_dir
      TorchConfigVersion.cmake
      PATHS
        ${Torch_ROOT}
        "$ENV{Torch_ROOT}"
        ${CMAKE_PREFIX_PATH}
        ${from_environment}
      PATH_SUFFIXES share/cmake/Torch Torch
      NO_DEFAULT_PATH
      NO_CACHE
    )
    if(config_dir)
      get_filename_component(root "${config_dir}/../../.." ABSOLUTE)
    endif()
  endif()
  set(${out} "${root}" PARENT_SCOPE)
endfunction()

# Sets in the caller what the LibTorch in <root> is:
#   FP16CORE_TORCH_VERSION    its version without a local tag, such as 2.13.0
#   FP16CORE_TORCH_CUDA       TRUE where it was built with CUDA
#   FP16CORE_TORCH_CXX11_ABI  1 or 0, the value of _GLIBCXX_USE_CXX11_ABI
#   FP16CORE_TORCH_OPENMP     the OpenMP runtime it carries, or an empty string
function(fp16core_describe_torch root)
  set(version "unknown")
  set(version_file "${root}/share/cmake/Torch/TorchConfigVersion.cmake")
  if(EXISTS "${version_file}")
    file(
      STRINGS "${version_file}"
      line
      REGEX "PACKAGE_VERSION \""
      LIMIT_COUNT 1
    )
    if(line MATCHES "\"([0-9]+\\.[0-9]+\\.[0-9]+)")
      set(version "${CMAKE_MATCH_1}")
    endif()
  endif()

  set(cuda FALSE)
  if(EXISTS "${root}/lib/libtorch_cuda.so")
    set(cuda TRUE)
  endif()

  # torch no longer writes its ABI down, but the mangled name of a constructor
  # that takes a std::string tells it.
  set(cxx11_abi 0)
  set(c10 "${root}/lib/libc10.so")
  if(EXISTS "${c10}")
    file(
      STRINGS "${c10}"
      symbol
      REGEX "_ZN3c105ErrorC[12].*__cxx11"
      LIMIT_COUNT 1
    )
    if(symbol)
      set(cxx11_abi 1)
    endif()
  endif()

  # Wheels carry libgomp under its own name, LibTorch archives under a name with
  # a hash in it.
  file(GLOB openmp "${root}/lib/libgomp*.so*")
  if(openmp)
    list(GET openmp 0 openmp)
  endif()

  set(FP16CORE_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(FP16CORE_TORCH_CUDA "${cuda}" PARENT_SCOPE)
  set(FP16CORE_TORCH_CXX11_ABI "${cxx11_abi}" PARENT_SCOPE)
  set(FP16CORE_TORCH_OPENMP "${openmp}" PARENT_SCOPE)
endfunction()

# Creates fp16core::torch from the LibTorch in <root>, with the values that
# fp16core_describe_torch set.
function(fp16core_import_torch root)
  if(TARGET fp16core::torch)
    return()
  endif()
  add_library(fp16core::torch INTERFACE IMPORTED)
  # Two libraries that a linker may not drop though it sees no use of them:
  # libtorch.so loads libtorch_cuda, and the OpenMP runtime must be torch's copy,
  # found by the program's own search path before libfp16core asks for it.
  set(needed "${root}/lib/libtorch.so" ${FP16CORE_TORCH_OPENMP})
  list(JOIN needed "," needed)
  set_target_properties(
    fp16core::torch
    PROPERTIES
      INTERFACE_INCLUDE_DIRECTORIES
        "${root}/include;${root}/include/torch/csrc/api/include"
      INTERFACE_COMPILE_DEFINITIONS
        "_GLIBCXX_USE_CXX11_ABI=${FP16CORE_TORCH_CXX11_ABI}"
      INTERFACE_LINK_LIBRARIES
        "-Wl,--push-state,--no-as-needed,${needed},--pop-state;${root}/lib/libtorch_cpu.so;${root}/lib/libc10.so"
  )
endfunction()
