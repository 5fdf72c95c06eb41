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

add_library(
  fp16core_on_host_objects
  OBJECT
  ${_cuda_sources}
  ${_folder}/device_on_host.cpp
  ${_folder}/kernels.cpp
  ${_folder}/runtime_on_host.cpp
)
target_link_libraries(fp16core_on_host_objects PRIVATE fp16core_objects)
target_include_directories(
  fp16core_on_host_objects
  BEFORE
  PRIVATE ${_folder} ${PROJECT_SOURCE_DIR}/cpp/src
)
fp16core_compile_options(fp16core_on_host_objects)
# Pragmas are nvcc's; and the loops of all rules take long to optimize.
target_compile_options(
  fp16core_on_host_objects
  PRIVATE -Wno-unknown-pragmas -O1
)

# All objects of the library but the choice of the backend.
set(
  _library_objects
  "$<FILTER:${fp16core_all_objects},EXCLUDE,/cpp/src/(kernels|no_cuda)[.]cpp>"
  $<TARGET_OBJECTS:fp16core_on_host_objects>
)

add_library(fp16core_on_host SHARED ${_library_objects})
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

# The program with the tests of the backend alone is for a race checker.
file(GLOB _tests CONFIGURE_DEPENDS ${_folder}/*_test.cpp)
add_executable(
  fp16core_on_host_tests
  $<TARGET_OBJECTS:fp16core_test_objects>
  ${_tests}
  ${_library_objects}
)
add_executable(
  fp16core_twin_tests
  EXCLUDE_FROM_ALL
  main.cpp
  ${_tests}
  ${_library_objects}
)
foreach(_program IN ITEMS fp16core_on_host_tests fp16core_twin_tests)
  target_link_libraries(
    ${_program}
    PRIVATE fp16core::torch ${fp16core_private_libraries}
  )
  target_include_directories(
    ${_program}
    BEFORE
    PRIVATE
      ${_folder}
      ${CMAKE_CURRENT_SOURCE_DIR}
      ${PROJECT_SOURCE_DIR}/cpp/src
      ${PROJECT_SOURCE_DIR}/cpp/include
  )
  target_include_directories(${_program} SYSTEM PRIVATE ${FP16CORE_DOCTEST_DIR})
  target_compile_features(${_program} PRIVATE cxx_std_20)
  fp16core_compile_options(${_program})
  fp16core_link_options(${_program})
endforeach()
add_test(NAME cpp_cuda_on_host COMMAND fp16core_on_host_tests)
