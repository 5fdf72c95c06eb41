# The CUDA backend on the host: its unchanged sources, compiled as C++ against a
# stand-in for the CUDA runtime, serve the tensors of the host.
#
# Two things are made of it: the C++ tests once more, with more for the backend
# itself, and a libfp16core.so that the Python tests can load in the place of the
# real one (its folder on LD_LIBRARY_PATH).

set(_folder ${CMAKE_CURRENT_SOURCE_DIR}/cuda_on_host)
set(_cuda_sources ${FP16CORE_CUDA_SOURCES})
list(REMOVE_ITEM _cuda_sources cpp/src/cuda/torch_runtime.cpp)
list(TRANSFORM _cuda_sources PREPEND ${PROJECT_SOURCE_DIR}/)
set(_cu_sources ${_cuda_sources})
list(FILTER _cu_sources INCLUDE REGEX "[.]cu$")
set_source_files_properties(
  ${_cu_sources}
  PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++"
)

set(
  _device_sources
  ${_cuda_sources}
  ${_folder}/device_on_host.cpp
  ${_folder}/kernels.cpp
  ${_folder}/runtime_on_host.cpp
)
file(GLOB _tests CONFIGURE_DEPENDS ${_folder}/*_test.cpp)

# What every target with sources for the device, or tests of it, needs.
function(fp16core_use_device_on_host target)
  target_include_directories(
    ${target}
    BEFORE
    PRIVATE
      ${_folder}
      ${CMAKE_CURRENT_SOURCE_DIR}
      ${PROJECT_SOURCE_DIR}/cpp/src
      ${PROJECT_SOURCE_DIR}/cpp/include
  )
  target_include_directories(${target} SYSTEM PRIVATE ${FP16CORE_DOCTEST_DIR})
  target_compile_features(${target} PRIVATE cxx_std_20)
  target_link_libraries(${target} PRIVATE fp16core::torch)
  fp16core_compile_options(${target})
  # Pragmas are nvcc's; and the loops of all rules take long to optimize.
  target_compile_options(${target} PRIVATE -Wno-unknown-pragmas -O1)
endfunction()

add_library(fp16core_on_host_objects OBJECT ${_device_sources})
fp16core_use_device_on_host(fp16core_on_host_objects)

# All objects of the library but the choice of the backend.
set(
  _library_objects
  "$<FILTER:${fp16core_all_objects},EXCLUDE,/cpp/src/(kernels|no_cuda)[.]cpp>"
)

add_library(
  fp16core_on_host
  SHARED
  ${_library_objects}
  $<TARGET_OBJECTS:fp16core_on_host_objects>
)
target_link_libraries(
  fp16core_on_host
  PRIVATE fp16core::torch ${fp16core_private_libraries}
)
fp16core_link_options(fp16core_on_host)
set_target_properties(
  fp16core_on_host
  PROPERTIES
    OUTPUT_NAME fp16core
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/on_host
)

add_executable(
  fp16core_on_host_tests
  $<TARGET_OBJECTS:fp16core_test_objects>
  ${_tests}
  ${_library_objects}
  $<TARGET_OBJECTS:fp16core_on_host_objects>
)
fp16core_use_device_on_host(fp16core_on_host_tests)
target_link_libraries(
  fp16core_on_host_tests
  PRIVATE ${fp16core_private_libraries}
)
fp16core_link_options(fp16core_on_host_tests)
# Thousands of iterations take minutes on threads that are fibers.
add_test(
  NAME cpp_cuda_on_host
  COMMAND fp16core_on_host_tests "--test-suite-exclude=many iterations"
)

# The tests of the backend alone under a race checker, for which each CUDA thread
# is a thread. Only what runs on the device is watched. Run it with
# OMP_NUM_THREADS=1: the checker does not understand OpenMP's threads.
add_executable(
  fp16core_race_tests
  EXCLUDE_FROM_ALL
  main.cpp
  ${_tests}
  ${_device_sources}
  ${_library_objects}
)
fp16core_use_device_on_host(fp16core_race_tests)
target_compile_options(fp16core_race_tests PRIVATE -fsanitize=thread -g1)
target_link_libraries(fp16core_race_tests PRIVATE ${fp16core_private_libraries})
target_link_options(fp16core_race_tests PRIVATE -fsanitize=thread)
