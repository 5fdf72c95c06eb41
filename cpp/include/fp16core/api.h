// The export macros of libfp16core.

#pragma once

#if defined(_WIN32)
#if defined(FP16CORE_BUILDING)
#define FP16CORE_API __declspec(dllexport)
#else
#define FP16CORE_API __declspec(dllimport)
#endif
#define FP16CORE_LOCAL
#else
#define FP16CORE_API __attribute__((visibility("default")))
// For what a class that is exported keeps to itself.
#define FP16CORE_LOCAL __attribute__((visibility("hidden")))
#endif
