// The entry point of the C++ tests.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest.h>

// torch's reader of archives leaks what it had where its constructor throws, as
// it does for every damaged file. Asked for by the leak checker alone.
extern "C" __attribute__((visibility("default"))) const char*
__lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:mz_zip_reader\n";
}
